"""Destinations of metrics: JSON lines always, others by the sections of `tracking`."""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Final, Protocol

from slipstream.configs.paths import RunPaths
from slipstream.configs.registry import Registry
from slipstream.configs.schema.run import TrackingConfig

LONGEST_LINE_BYTES: Final = 1 << 20
TRACKERS: Final = Registry("tracker", {"swanlab": "slipstream.learner.metrics.swanlab:SwanlabTracker"})
"""Trackers besides `metrics.jsonl`, by their section of `tracking`."""

Record = Mapping[str, float | int | str]
"""One measurement; its key `kind` is `step`, `eval` or `finish`."""


class Tracker(Protocol):
    """A destination of metrics."""

    def log(self, record: Record) -> None:
        """Stores or sends one record; must not block on a network."""

    def close(self) -> None:
        """Flushes; nothing is logged afterwards."""


def build_trackers(
    paths: RunPaths, tracking: TrackingConfig, *, run: str, recorded: Mapping[str, Any]
) -> list[Tracker]:
    """JSONL always, and each tracker that is configured.

    Args:
        recorded: the configuration that a tracker records.

    Raises: ConfigError when a configured tracker is not installed or can't start.
    """
    configured = {name: settings for name, settings in tracking if settings is not None}
    others = [TRACKERS.load(name)(settings, paths, run=run, recorded=recorded) for name, settings in configured.items()]
    return [JsonlTracker(paths.metrics), *others]


class JsonlTracker:
    """Appends one JSON object per record to a file, whole or not at all. A moved or deleted file is created again."""

    def __init__(self, path: Path) -> None:
        """Creates the file's folder if needed; a resumed run appends."""
        self._path = path
        self._file = _open_for_append(path)

    def log(self, record: Record) -> None:
        """Appends the record; NaN and infinity, which JSON lacks, become null. Raises: OSError."""
        if not _is_at(self._path, self._file.fileno()):
            self._file.close()
            self._file = _open_for_append(self._path)
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        size = os.fstat(self._file.fileno()).st_size
        line = memoryview(json.dumps(finite, allow_nan=False).encode() + b"\n")
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
