"""What a tracker is."""

from collections.abc import Mapping
from typing import Protocol

Record = Mapping[str, float | int | str]
"""One measurement; its key `kind` is `step`, `eval` or `finish`."""


class Tracker(Protocol):
    """Takes the learner's metrics somewhere."""

    def log(self, record: Record) -> None:
        """Takes one record; must not block on a network."""

    def close(self) -> None:
        """Writes out what is left. Nothing is logged afterwards."""
