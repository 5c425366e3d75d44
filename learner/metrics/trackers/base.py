"""The interface of trackers."""

from collections.abc import Mapping
from typing import Protocol

Record = Mapping[str, float | int | str]
"""One measurement; its key `kind` is `step`, `eval` or `finish`."""


class Tracker(Protocol):
    """A destination of metrics."""

    def log(self, record: Record) -> None:
        """Stores or sends one record; must not block on a network."""

    def close(self) -> None:
        """Flushes; nothing is logged afterwards."""
