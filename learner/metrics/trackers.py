"""Trackers of metrics and samples: JSON lines always, others by the sections of `tracking`, each in a thread."""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from queue import Full, Queue
from typing import Any, Final, Protocol

from slipstream.configs.paths import RunPaths
from slipstream.configs.registry import Registry
from slipstream.configs.runtime.errors import ConfigError, format_error
from slipstream.configs.runtime.exposition import serve_metrics
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.base import Section
from slipstream.configs.schema.tracking import TrackingConfig
from slipstream.learner.metrics.catalog import translate
from slipstream.learner.metrics.destinations import Destination, Row, TrackedRun

log = get_log("learner.tracking")

LONGEST_LINE_BYTES: Final = 1 << 20
MOST_WAITING: Final = 4096
"""Records and samples that wait for a tracker; beyond that, new ones are not sent."""
TRIES: Final = 3
"""Attempts to store a record, which a tracker may refuse for ever."""
LONGEST_PAUSE_S: Final = 60.0
CLOSING_S: Final = 30.0
"""Time that a tracker has at the end of a run to send what is left."""
DESTINATIONS: Final = Registry(
    "tracker",
    {
        name: f"slipstream.learner.metrics.destinations:{name.capitalize()}"
        for name in ("swanlab", "wandb", "mlflow", "tensorboard", "trackio")
    },
)
"""Trackers besides `metrics.jsonl`, by their section of `tracking`."""
PACKAGES: Final = {"tensorboard": "tensorboardX"}
"""Packages with another name than their tracker."""
NOT_METRICS: Final = {"kind", "step", "steps", "time_s"}

Record = Mapping[str, float | int | str]
"""One measurement; its key `kind` is `step`, `eval` or `finish`."""


class Tracker(Protocol):
    """A destination of metrics."""

    def log(self, record: Record) -> None:
        """Stores or sends one record; must not block on a network."""

    def add_rows(self, table: str, rows: Callable[[], Sequence[Row]]) -> None:
        """Adds rows to a table, if it has any; must not block on a network.

        Args:
            rows: makes them, which may take a while; called in another thread, if at all.
        """

    def close(self) -> None:
        """Flushes; nothing is logged afterwards."""


def build_trackers(
    paths: RunPaths, tracking: TrackingConfig, *, run: str, recorded: Mapping[str, Any]
) -> list[Tracker]:
    """JSONL always, and each tracker that is configured.

    Args:
        recorded: the configuration that a tracker records.

    Raises: ConfigError when a configured tracker is not installed.
    """
    configured = {name: settings for name, settings in tracking if isinstance(settings, Section)}
    if missing := [name for name in configured if find_spec(PACKAGES.get(name, name)) is None]:
        raise ConfigError(
            [
                f"tracking.{name}: the package {PACKAGES.get(name, name)} is not installed; pip install "
                f"'slipstream[{name}]', or leave tracking.{name} out"
                for name in missing
            ]
        )

    tracked = TrackedRun(run, tracking.project, paths, recorded)

    def opening(name: str, settings: Section) -> Callable[[], Destination]:
        def open_destination() -> Destination:
            destination: Destination = DESTINATIONS.load(name)(settings, tracked)
            return destination

        return open_destination

    others = [BackgroundTracker(name, opening(name, settings), tracking) for name, settings in configured.items()]
    return [JsonlTracker(paths.metrics), *_prometheus(paths, tracking, run), *others]


def _prometheus(paths: RunPaths, tracking: TrackingConfig, run: str) -> list[Tracker]:
    """The tracker of `tracking.prometheus`, if that is set. Raises: ConfigError when its address can't be used."""
    if tracking.prometheus is None:
        return []
    from slipstream.learner.metrics.prometheus import PrometheusTracker

    tracker = PrometheusTracker()
    serve_metrics(tracking.prometheus, paths.prometheus, run=run, process="learner", read=tracker.readings)
    return [tracker]


class BackgroundTracker:
    """Hands records and rows to a destination in a thread of its own, and never delays the caller.

    A destination that can't be opened, or fails, is named once and tried again with growing pauses. What it refuses
    three times, and what comes when too much waits, is counted.

    Attributes:
        lost: records, and groups of rows, that were not stored.
    """

    def __init__(self, name: str, opening: Callable[[], Destination], tracking: TrackingConfig) -> None:
        """Starts the thread; `opening` opens the destination, may block, and raise anything."""
        self.lost = 0
        self._name = name
        self._opening = opening
        self._tracking = tracking
        self._destination: Destination | None = None
        self._waiting: Queue[Callable[[Destination], None] | None] = Queue(MOST_WAITING)
        self._closing = threading.Event()
        self._failures: set[str] = set()
        self._step = 0
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, record: Record) -> None:
        """Sends the numbers of a record of kind `step` or `eval`."""
        kind = record.get("kind")
        if kind not in ("step", "eval"):
            return
        self._step = step = int(record.get("step", self._step))
        values = {name: value for name, value in record.items() if name not in NOT_METRICS}
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        translated = translate(numbers, "eval" if kind == "eval" else "step", self._tracking.names)
        self._add(lambda destination: destination.log(translated, step=step))

    def add_rows(self, table: str, rows: Callable[[], Sequence[Row]]) -> None:
        """Sends rows, unless `tracking.samples` is off."""
        step = self._step
        if self._tracking.samples:
            self._add(lambda destination: destination.add_rows(table, rows(), step=step))

    def close(self) -> None:
        """Waits for what is left to be sent, for a bounded time."""
        deadline = time.monotonic() + CLOSING_S
        self._closing.set()
        with suppress(Full):
            self._waiting.put(None, timeout=CLOSING_S)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        unsent = self.lost + self._waiting.qsize() if self._thread.is_alive() else self.lost
        if unsent:
            log.warning("not all was sent to a tracker; metrics.jsonl has all", tracker=self._name, unsent=unsent)

    def _add(self, item: Callable[[Destination], None]) -> None:
        try:
            self._waiting.put_nowait(item)
        except Full:
            self.lost += 1

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            for attempt in range(TRIES):
                if self._attempt(item):
                    break
                self._closing.wait(min(2.0**attempt, LONGEST_PAUSE_S))
            else:
                self.lost += 1
        if self._destination is not None:
            self._guarded(self._destination.close)

    def _attempt(self, item: Callable[[Destination], None]) -> bool:
        """Opens the destination, until that succeeds or the run ends, and gives it an item."""
        pause_s = 1.0
        while self._destination is None:
            if not self._guarded(self._open):
                if self._closing.wait(pause_s):
                    return False
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        destination = self._destination
        return self._guarded(lambda: item(destination))

    def _open(self) -> None:
        self._destination = self._opening()

    def _guarded(self, call: Callable[[], None]) -> bool:
        """Calls; False after an exception, which is logged once for each text."""
        try:
            call()
        except Exception as error:  # noqa: BLE001  (a tracker's package may raise anything)
            reason = format_error(error)
            if reason not in self._failures:
                self._failures.add(reason)
                log.warning("a tracker fails; training goes on", tracker=self._name, error=reason)
            return False
        return True


class LineFile:
    """A file of lines, each appended whole or not at all. A moved or deleted file is created again."""

    def __init__(self, path: Path) -> None:
        """Creates the file's folder if needed; a resumed run appends. Raises: OSError."""
        self._path = path
        self._file = _open_for_append(path)

    def append(self, content: str) -> None:
        """Appends a line. Raises: OSError."""
        if not _is_at(self._path, self._file.fileno()):
            self._file.close()
            self._file = _open_for_append(self._path)
        size = os.fstat(self._file.fileno()).st_size
        line = memoryview(content.encode() + b"\n")
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:  # on a full disk, after a part of the line
            with suppress(OSError):
                self._file.truncate(size)
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class JsonlTracker(LineFile):
    """Appends one JSON object per record to a file."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Appends the record; NaN and infinity, which JSON lacks, become null. Raises: OSError."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        self.append(json.dumps(finite, allow_nan=False))

    def add_rows(self, table: str, rows: Callable[[], Sequence[Row]]) -> None:
        """Nothing: the run folder has samples of its own."""


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Appends one line to a file that is seldom written. Raises: OSError."""
    with closing(JsonlTracker(path)) as file:
        file.log(record)


def _open_for_append(path: Path) -> FileIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab", buffering=0)
    _cut_half_line(path)
    return file


def _is_at(path: Path, opened: int) -> bool:
    """True if an open file still has this path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(opened))
    except FileNotFoundError:
        return False


def _cut_half_line(path: Path) -> None:
    """Removes the last line if the process was killed while it wrote that: it would spoil the next one."""
    with path.open("r+b") as file:
        start = max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE_BYTES)
        file.seek(start)
        tail = file.read()
        if not tail.endswith(b"\n"):
            file.truncate(start + tail.rfind(b"\n") + 1)
