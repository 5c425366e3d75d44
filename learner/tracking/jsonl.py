"""Metrics as JSON lines: what the progress table, the picture and the summary are made from."""

import json
import math
import os
from pathlib import Path

from slipstream.learner.tracking.base import Record


class JsonlTracker:
    """Appends one JSON object per record to a file, and flushes it, so that readers may follow."""

    def __init__(self, path: Path) -> None:
        """Makes the file's folder if need be; a run that continues goes on in the same file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_off = _is_cut_off(path)
        self._file = path.open("a", encoding="utf-8")
        if cut_off:  # the next record must not be lost with that line
            self._file.write("\n")

    def log(self, record: Record) -> None:
        """Appends the record; JSON has no NaN and no infinity, they become null."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _is_cut_off(path: Path) -> bool:
    """Whether a crash left the file's last line without its end."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
