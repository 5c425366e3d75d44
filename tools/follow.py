"""Reader of JSON lines that other processes are still writing."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]
MISSING = "-"
"""Shown in place of a number that a record lacks."""


class JsonLinesFollower:
    """Reads the records that were appended to a file since the last call; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        """Skips the present content of the file."""
        self.path = path
        status = path.stat() if path.exists() else None
        self._offset, self._inode = (status.st_size, status.st_ino) if status else (0, 0)

    def new_records(self) -> list[Record]:
        """The records of all complete lines since the last call."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:  # rotated
                    self._offset, self._inode = 0, status.st_ino
                file.seek(self._offset)
                complete, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(complete) + len(newline)
        return parse_lines(complete)


def number(record: Mapping[str, Any], key: str) -> float | None:
    """A numeric field, or None where it is missing or not a number."""
    value = record.get(key)
    return float(value) if isinstance(value, int | float) else None


def parse_lines(text: bytes) -> list[Record]:
    """The JSON objects, one per line; other lines are skipped."""
    records: list[Record] = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
    return records
