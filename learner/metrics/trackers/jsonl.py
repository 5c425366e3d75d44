"""Metrics as JSON lines: what the progress table, the picture and the summary are made from."""

import json
import math
import os
from pathlib import Path
from typing import TextIO

from slipstream.learner.metrics.trackers.base import Record


class JsonlTracker:
    """Appends one JSON object per record to a file, and flushes it, so that readers may follow.

    A file that was moved or deleted is begun anew.
    """

    def __init__(self, path: Path) -> None:
        """Makes the file's folder if need be; a run that continues goes on in the same file."""
        self._path = path
        self._file = _opened(path)

    def log(self, record: Record) -> None:
        """Appends the record; JSON has no NaN and no infinity, they become null."""
        if not _is_at(self._path, self._file.fileno()):
            self._file.close()
            self._file = _opened(self._path)
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _opened(path: Path) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_off = _is_cut_off(path)
    file = path.open("a", encoding="utf-8")
    if cut_off:  # the next record must not be lost with that line
        file.write("\n")
    return file


def _is_at(path: Path, opened: int) -> bool:
    """Whether an open file still has this path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(opened))
    except FileNotFoundError:
        return False


def _is_cut_off(path: Path) -> bool:
    """Whether a crash left the file's last line without its end."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
