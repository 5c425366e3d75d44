"""Events of a run, in `events.jsonl`: restarts, rollout servers that join or leave, the throttle's moves, warnings."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from slipstream.configs.runtime.logging import get_log
from slipstream.learner.metrics.trackers import append_record

log = get_log("learner.events")

EventKind = Literal["restart", "server_joined", "server_lost", "engine_death", "throttle", "warning"]
KIND: Final = "event_kind"
"""Field of a log line whose event is not a `warning`."""
MOST_ALIKE: Final = 200
"""Most events of one kind and text, or of one place in another package, since a start."""
_OF_THE_LINE: Final = frozenset({"event", "level", "timestamp", "step", KIND})


class EventLog(logging.Handler):
    """Appends events to a file. As a handler of the process's log it gets all warnings, and errors.

    A failure to write is logged once, and costs the events only.
    """

    def __init__(self, path: Path, *, started: float) -> None:
        """`started`: start of the run, by this host's monotonic clock."""
        super().__init__(logging.WARNING)
        self._path = path
        self._started = started
        self._is_broken = False
        self._counts = Counter[tuple[str, str]]()
        self._writing = threading.Lock()
        self.step = 0
        """Steps done: of events that name none."""

    def add(self, kind: EventKind, text: str, *, step: int | None = None, **fields: Any) -> None:
        """Appends an event.

        Args:
            step: steps done; None: the latest.
            fields: details.
        """
        self._append(kind, text, step, fields, alike=text)

    def emit(self, record: logging.LogRecord) -> None:
        """Appends a line of the log."""
        if not isinstance(record.msg, dict):  # of another package, whose texts may all differ
            try:
                text = record.getMessage()
            except (TypeError, ValueError, KeyError):  # its arguments don't fit its text
                self.handleError(record)
                return
            self._append("warning", text, None, {}, alike=f"{record.pathname}:{record.lineno}")
            return
        text = str(record.msg.get("event", ""))
        fields = {name: _plain(value) for name, value in record.msg.items() if name not in _OF_THE_LINE}
        self._append(record.msg.get(KIND, "warning"), text, record.msg.get("step"), fields, alike=text)

    def _append(self, kind: EventKind, text: str, step: int | None, fields: Mapping[str, Any], *, alike: str) -> None:
        """Appends an event, unless there were MOST_ALIKE of its kind and `alike` before."""
        event = {
            "time_s": time.monotonic() - self._started,
            "at": time.time(),
            "step": self.step if step is None else step,
            "kind": kind,
            "text": text,
        }
        try:
            with self._writing:
                self._counts[kind, alike] += 1
                count = self._counts[kind, alike]
                if self._is_broken or count > MOST_ALIKE:
                    return
                last = {"further_ones": "not kept"} if count == MOST_ALIKE else {}
                append_record(self._path, {**fields, **event, **last})
        except OSError as error:
            self._is_broken = True  # first: the warning comes here too
            log.warning("events are no longer kept", file=str(self._path), error=str(error))


def _plain(value: object) -> object:
    """A value that JSON has."""
    return value if isinstance(value, str | int | float | bool | None) else str(value)
