"""Events of a run, in `events.jsonl`: restarts, rollout servers that join or leave, the throttle's moves, warnings."""

import logging
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final, Literal

from slipstream.configs.runtime.logging import get_log
from slipstream.learner.metrics.trackers import append_record

log = get_log("learner.events")

EventKind = Literal["restart", "server_joined", "server_lost", "engine_death", "throttle", "warning"]
KIND: Final = "event_kind"
"""Field of a log line whose event is not a `warning`."""
MOST_ALIKE: Final = 200
"""Most events of one kind and text, since a start."""
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
        self._counts[kind, text] += 1
        if self._is_broken or self._counts[kind, text] > MOST_ALIKE:
            return
        event = {
            "time_s": time.monotonic() - self._started,
            "at": time.time(),
            "step": self.step if step is None else step,
            "kind": kind,
            "text": text,
        }
        try:
            with self._writing:
                append_record(self._path, {**fields, **event})
        except OSError as error:
            self._is_broken = True  # first: the warning comes here too
            log.warning("events are no longer kept", file=str(self._path), error=str(error))

    def emit(self, record: logging.LogRecord) -> None:
        """Appends a line of the log."""
        if not isinstance(record.msg, dict):  # of another package
            self.add("warning", record.getMessage())
            return
        fields = {name: _plain(value) for name, value in record.msg.items() if name not in _OF_THE_LINE}
        step = record.msg.get("step")
        self.add(record.msg.get(KIND, "warning"), str(record.msg.get("event", "")), step=step, **fields)


def _plain(value: object) -> object:
    """A value that JSON has."""
    return value if isinstance(value, str | int | float | bool | None) else str(value)
