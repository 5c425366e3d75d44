"""Reader of JSON lines that other processes are still writing."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

Record = dict[str, Any]
MISSING = "-"
"""Shown in place of a number that a record lacks."""
PART_BYTES: Final = 4 << 20
"""Most bytes that are read at once. A longer line is skipped."""


class LineFollower:
    """Reads the complete lines of a file from an offset on, a part at a time; the file may not exist yet.

    Attributes:
        offset: the byte after the last line that was read.
        replaced: how often the file was found replaced or cut; the offset was 0 again then.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.replaced = 0
        self._inode = path.stat().st_ino if path.exists() else None

    def lines(self) -> list[bytes]:
        """The next lines, without their ends; none where the file has no more at present."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size < self.offset or self._inode not in (None, status.st_ino):
                    self.offset = 0
                    self.replaced += 1
                self._inode = status.st_ino
                while True:
                    file.seek(self.offset)
                    part = file.read(PART_BYTES)
                    complete, newline, _ = part.rpartition(b"\n")
                    if newline or len(part) < PART_BYTES:
                        break
                    self.offset += len(part)
        except OSError:  # missing, or not to be read at present
            return []
        self.offset += len(complete) + len(newline)
        return complete.split(b"\n") if newline else []

    def skip(self) -> None:
        """Moves to the end of the last complete line."""
        try:
            with self.path.open("rb") as file:
                start = max(0, os.fstat(file.fileno()).st_size - PART_BYTES)
                file.seek(start)
                self.offset = start + file.read().rfind(b"\n") + 1
        except OSError:
            self.offset = 0


class JsonLinesFollower:
    """Reads the records that were appended to a file since the last call; the file may not exist yet."""

    def __init__(self, path: Path, *, last_bytes: int = 0) -> None:
        """Skips the present content of the file, but for its last bytes."""
        status = path.stat() if path.exists() else None
        self._lines = LineFollower(path, max(0, status.st_size - last_bytes) if status else 0)

    def new_records(self) -> list[Record]:
        """The records of all complete lines since the last call."""
        records: list[Record] = []
        while lines := self._lines.lines():
            records += parse_lines(b"\n".join(lines))
        return records


def number(record: Mapping[str, Any], key: str) -> float | None:
    """A numeric field, or None where it is missing, not a number, or beyond a float."""
    value = record.get(key)
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


def parse_lines(text: bytes) -> list[Record]:
    """The JSON objects, one per line; other lines are skipped."""
    return [record for line in text.splitlines() if (record := parse_line(line)) is not None]


def parse_line(line: bytes) -> Record | None:
    """The JSON object of a line; None if it is none."""
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            record = json.loads(line)  # knows NaN, and halves of surrogate pairs
        except (ValueError, RecursionError):
            return None
    return record if isinstance(record, dict) else None


def json_bytes(value: Any) -> bytes:
    """The value as JSON that browsers read: null for what is no finite number, `?` for a half of a surrogate pair."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_encodable(value))


def json_text(value: Any) -> str:
    """The value as indented JSON for a terminal: as `json_bytes`, in ASCII."""
    return json.dumps(msgspec.json.decode(json_bytes(value)), indent=2)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(inner) for key, inner in value.items()}
    return [_encodable(inner) for inner in value] if isinstance(value, list | tuple) else value
