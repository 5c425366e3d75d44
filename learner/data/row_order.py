"""Training rows of files in a fixed random order, which a resumed training continues at any step; held-out rows."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.trainers import DataConfig
from slipstream.models.row_sources import Row, RowSource, open_sources

GOLDEN: Final = (5**0.5 - 1) / 2
"""Multiples of it, modulo 1, are spread evenly over [0, 1): any part of the order has the sources' shares."""
COUNTED_AT_ONCE: Final = 1 << 20


@dataclass(frozen=True)
class RowRef:
    """A row of a source."""

    source: "Source"
    index: int

    @property
    def place(self) -> str:
        """File and line, or file and index."""
        return self.source.place(self.index)

    def read(self) -> Row:
        """The row. Raises: ValueError for a malformed one."""
        return self.source.row(self.index)


class Source:
    """The rows of one `DataConfig`, of all its files in their order."""

    def __init__(self, config: DataConfig, *, default_split: str, what: str, pairs: bool = False) -> None:
        """Args: pairs: of a run's groups, only those that have a pair of a better and a worse answer.

        Raises: ConfigError, which begins with `what`, when they can't be read.
        """
        self.config = config
        self._files: list[RowSource]
        if config.run is not None:
            # Imported here: it needs Redis's client, which files do not.
            from slipstream.learner.data.recorded_groups import RecordedGroups

            self._files = [RecordedGroups(config.run, pairs=pairs)]
        else:
            self._files = open_sources(
                config.paths, subset=config.subset, split=config.split, default_split=default_split, what=what
            )
        self._ends = list(accumulate(map(len, self._files)))

    def __len__(self) -> int:
        """Number of rows."""
        return self._ends[-1] if self._ends else 0

    def place(self, index: int) -> str:
        """File and line, or file and index of a row."""
        file, within = self._located(index)
        return file.place(within)

    def row(self, index: int) -> Row:
        """A row. Raises: ValueError for a malformed one."""
        file, within = self._located(index)
        return file.row(within)

    def _located(self, index: int) -> tuple[RowSource, int]:
        number = bisect_right(self._ends, index)
        return self._files[number], index - self._ends[number] + len(self._files[number])


@dataclass
class Shuffle:
    """Draws from `size` items: each once in an epoch, every epoch in another order."""

    size: int
    seed: tuple[int, ...]
    _epoch: int = -1
    _order: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def item(self, draw: int) -> int:
        """The item of a 0-based draw."""
        epoch, place = divmod(draw, self.size)
        if epoch != self._epoch:
            generator = np.random.default_rng(np.random.SeedSequence([*self.seed, epoch]))
            self._epoch, self._order = epoch, generator.permutation(self.size)
        return int(self._order[place])


class RowOrder:
    """The order of the training rows: a function of the rows, the weights and the seed alone.

    Without weights, an epoch has every row once. With weights, each source has epochs of its own.
    """

    def __init__(self, parts: Sequence[tuple[Source, int]], *, seed: int) -> None:
        """Args:
        parts: the sources, and the number of training rows at the start of each.
        """
        self._parts = parts
        self.rows = sum(rows for _, rows in parts)
        """Number of training rows."""
        self._ends = list(accumulate(rows for _, rows in parts))
        weights = [source.config.weight for source, _ in parts]
        self._is_weighted = weights[0] is not None
        total = sum(weight or 0.0 for weight in weights)
        self._bounds = np.cumsum([(weight or 0.0) / total for weight in weights])[:-1] if total else np.zeros(0)
        sizes = [rows for _, rows in parts] if self._is_weighted else [self.rows]
        self._shuffles = [Shuffle(size, (seed, number)) for number, size in enumerate(sizes)]
        self._counted, self._drawn = 0, np.zeros(len(sizes), dtype=np.int64)

    @property
    def sources(self) -> list[Source]:
        """The sources of the training rows."""
        return [source for source, _ in self._parts]

    def step(self, step: int, *, rows: int) -> list[RowRef]:
        """The rows of a 0-based step of so many rows."""
        first = step * rows
        if not self._is_weighted:
            return [self._located(self._shuffles[0].item(draw)) for draw in range(first, first + rows)]
        drawn, found = self._draws_before(first), list[RowRef]()
        for number in self._sources_of(first, first + rows):
            source, _ = self._parts[number]
            found.append(RowRef(source, self._shuffles[number].item(int(drawn[number]))))
            drawn[number] += 1
        return found

    def _located(self, item: int) -> RowRef:
        number = bisect_right(self._ends, item)
        source, rows = self._parts[number]
        return RowRef(source, item - self._ends[number] + rows)

    def _sources_of(self, first: int, end: int) -> NDArray[np.int64]:
        """The sources from which the rows of these places come."""
        return np.searchsorted(self._bounds, np.arange(first + 1, end + 1) * GOLDEN % 1, side="right")

    def _draws_before(self, place: int) -> NDArray[np.int64]:
        """Number of draws from each source before a place."""
        if place < self._counted:
            self._counted, self._drawn = 0, np.zeros_like(self._drawn)
        while self._counted < place:
            end = min(place, self._counted + COUNTED_AT_ONCE)
            self._drawn += np.bincount(self._sources_of(self._counted, end), minlength=len(self._drawn))
            self._counted = end
        return self._drawn.copy()


def open_rows(
    data: Sequence[DataConfig], *, validation: Sequence[DataConfig], held_out: int, seed: int, pairs: bool = False
) -> tuple[RowOrder, list[RowRef]]:
    """The order of the training rows, and the validation rows.

    Args:
        validation: sources of validation rows.
        pairs: of a run's groups, only those that have a pair of a better and a worse answer.
        held_out: rows at the ends of the sources of training rows that are validation rows instead.

    Raises: ConfigError when files can't be read, or there are no rows.
    """
    trained = [Source(each, default_split="train", what="learner.trainer.data", pairs=pairs) for each in data]
    others = [
        Source(each, default_split="test", what="learner.trainer.validation.data", pairs=pairs) for each in validation
    ]
    problems = [
        f"{key}: {source.config.path} has no rows"
        for key, sources in (("learner.trainer.data", trained), ("learner.trainer.validation.data", others))
        for source in sources
        if not len(source)
    ]
    total = sum(map(len, trained))
    if held_out >= total > 0:
        problems.append(f"learner.trainer.validation.rows={held_out} must leave training rows; there are {total}")
    if problems:
        raise ConfigError(problems)
    kept = _shares([len(source) for source in trained], total - held_out)
    parts = [(source, rows) for source, rows in zip(trained, kept, strict=True) if rows]
    held = [
        RowRef(source, index) for source, rows in zip(trained, kept, strict=True) for index in range(rows, len(source))
    ]
    return RowOrder(parts, seed=seed), held + [
        RowRef(source, index) for source in others for index in range(len(source))
    ]


def _shares(sizes: Sequence[int], total: int) -> list[int]:
    """`total` divided in proportion to the sizes, by largest remainders."""
    exact = [size * total / sum(sizes) for size in sizes]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda number: shares[number] - exact[number])
    for number in by_remainder[: total - sum(shares)]:
        shares[number] += 1
    return shares
