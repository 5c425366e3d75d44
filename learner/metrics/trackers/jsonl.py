"""Metrics as JSON lines, from which progress table, curves and summary are made."""

import json
import math
import os
from pathlib import Path
from typing import TextIO

from slipstream.learner.metrics.trackers.base import Record


class JsonlTracker:
    """Appends one JSON object per record to a file and flushes it. A moved or deleted file is created again."""

    def __init__(self, path: Path) -> None:
        """Creates the file's folder if needed; a resumed run appends."""
        self._path = path
        self._file = _open_for_append(path)

    def log(self, record: Record) -> None:
        """Appends the record; NaN and infinity, which JSON lacks, become null."""
        if not _is_at(self._path, self._file.fileno()):
            self._file.close()
            self._file = _open_for_append(self._path)
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _open_for_append(path: Path) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    truncated = _is_truncated(path)
    file = path.open("a", encoding="utf-8")
    if truncated:  # otherwise the next record would be lost with that line
        file.write("\n")
    return file


def _is_at(path: Path, opened: int) -> bool:
    """True if an open file still has this path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(opened))
    except FileNotFoundError:
        return False


def _is_truncated(path: Path) -> bool:
    """True if a crash truncated the file's last line."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
