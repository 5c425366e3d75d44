"""Reads JSON lines from files that other processes are still writing."""

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class JsonLinesFollower:
    """Gives the records that were appended to a file since the last call; the file may not be there yet."""

    def __init__(self, path: Path) -> None:
        """What the file already holds is passed over."""
        self.path = path
        self.unreadable = 0
        """Lines that were no JSON object."""
        self._offset = path.stat().st_size if path.exists() else 0

    def new_records(self) -> list[Record]:
        """All whole lines since the last call, parsed."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(newline)
        records, unreadable = parse_lines(whole)
        self.unreadable += unreadable
        return records


def read_records(path: Path, keys: Set[str]) -> list[Record]:
    """These fields of all records of a file, which may have many more; none if it isn't there."""
    if not path.exists():
        return []
    with path.open("rb") as lines:
        return [{key: record[key] for key in keys & record.keys()} for line in lines for record in parse_lines(line)[0]]


def parse_lines(text: bytes) -> tuple[list[Record], int]:
    """The JSON objects, one per line, and the number of lines that are something else."""
    records: list[Record] = []
    unreadable = 0
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif line.strip():
            unreadable += 1
    return records, unreadable
