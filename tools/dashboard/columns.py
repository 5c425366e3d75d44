"""The metrics of a run as columns of numbers: read once, extended as the file grows, thinned for drawing."""

import fnmatch
import math
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from slipstream.tools.follow import LineFollower, Record, parse_line

DIGITS: Final = 7
"""Significant digits of the numbers that are sent; whole numbers are sent as they are."""
MOST_POINTS: Final = 2000
MOST_COLUMNS: Final = 4096
"""Keys of a kind; further ones are left out."""
TIME, STEP, VERSION = "time_s", "step", "policy_version"
Column = NDArray[np.float64]


class Table:
    """Rows of numbers that are appended or replaced by their key, a column for each field; NaN where one is missing."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._row_of: dict[int, int] = {}
        self._columns: dict[str, array[float]] = {}

    def add(self, record: Record) -> None:
        """Adds a record, in place of an earlier one that has its key; one without a key is left out."""
        key = as_number(record.get(self._key))
        if not math.isfinite(key):
            return
        rows = len(self._row_of)
        row = self._row_of.setdefault(int(key), rows)
        if row < rows:
            for replaced in self._columns.values():
                if row < len(replaced):
                    replaced[row] = math.nan
        for name, value in record.items():
            if isinstance(value, int | float):
                column = self._columns.get(name)
                if column is None:
                    if len(self._columns) == MOST_COLUMNS:
                        continue
                    column = self._columns[name] = array("d")
                if len(column) <= row:
                    column.extend([math.nan] * (row - len(column) + 1))
                column[row] = as_number(value)

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def names(self) -> list[str]:
        """The fields, in the order of their first appearance."""
        return list(self._columns)

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory."""
        return 8 * sum(map(len, self._columns.values())) + 100 * len(self._row_of)

    def sorted(self, names: Iterable[str]) -> tuple[Column, dict[str, Column]]:
        """The keys, ascending, and these columns in that order; unknown names are left out."""
        rows = len(self._row_of)
        keys = np.fromiter(self._row_of, dtype=np.float64, count=rows)
        order = np.argsort(keys, kind="stable")
        columns = {}
        for name in names:
            if name in self._columns:
                column = np.full(rows, np.nan)
                column[: len(self._columns[name])] = self._columns[name]
                columns[name] = column[order]
        return keys[order], columns


class MetricsTable:
    """The steps and the evaluations of a metrics file. Not for several threads at once."""

    def __init__(self, path: Path) -> None:
        self._follower = LineFollower(path)
        self._clear()

    def _clear(self) -> None:
        self._replaced = self._follower.replaced
        self.steps = Table(STEP)
        self.evaluations = Table(VERSION)
        self.last: dict[str, Record] = {}
        """The latest record of each kind."""

    @property
    def offset(self) -> int:
        """The byte of the file after the last line that is contained."""
        return self._follower.offset

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory."""
        return self.steps.size_bytes + self.evaluations.size_bytes

    def update(self) -> None:
        """Reads what was appended."""
        while lines := self._follower.lines():
            if self._follower.replaced > self._replaced:
                self._clear()
            for line in lines:
                record = parse_line(line)
                if record is None:
                    continue
                kind = record.get("kind")
                if kind == "step":
                    self.steps.add(record)
                elif kind == "eval":
                    # Measurements of a training without policy versions are of the steps done.
                    self.evaluations.add({VERSION: record.get(STEP), **record})
                self.last[str(kind)] = record

    def series(
        self,
        kind: str = "step",
        keys: Sequence[str] = ("*",),
        *,
        first: float = -math.inf,
        last: float = math.inf,
        points: int = MOST_POINTS,
    ) -> dict[str, Any]:
        """Columns of steps or evaluations, `{"step", "time_s", "columns", "total", "offset"}`.

        Args:
            kind: `step`, or `eval`, whose `step` is the one that made the evaluated version.
            keys: names, or patterns with `*`.
            first: the first step.
            last: the last one.
            points: most rows; see `thinned`.
        """
        table = self.evaluations if kind == "eval" else self.steps
        chosen = _matching(table.names, keys)
        steps, columns = table.sorted([TIME, *chosen])
        if kind == "eval":
            steps = self._step_of_versions(steps)
        inside = (steps >= first) & (steps <= last)
        total = len(steps)
        steps, columns = steps[inside], {name: column[inside] for name, column in columns.items()}
        steps, columns = thinned(steps, columns, points)
        time_s = columns.pop(TIME, np.full(len(steps), np.nan))
        return {
            "step": numbers(steps),
            "time_s": numbers(time_s),
            "columns": {name: numbers(column) for name, column in columns.items()},
            "total": total,
            "offset": self.offset,
        }

    def _step_of_versions(self, versions: Column) -> Column:
        """The first step after which each version was the latest; 0 for those that no step made.

        In a training without policy versions, they are steps already.
        """
        steps, columns = self.steps.sorted([VERSION])
        if VERSION not in columns:
            return versions
        made = columns.get(VERSION, np.full(len(steps), np.nan))
        step_of = dict(zip(made[::-1].tolist(), steps[::-1].tolist(), strict=True))
        return np.array([step_of.get(version, 0.0) if version else 0.0 for version in versions.tolist()])


def thinned(steps: Column, columns: dict[str, Column], points: int) -> tuple[Column, dict[str, Column]]:
    """At most `points` rows in which each column keeps the lowest and the highest value of each stretch of steps.

    The rows of a stretch stand at its first and its last step, and each column has its two extremes there in the order
    of their steps: all columns share the steps, and no spike is lost. The last row is kept as it is.
    """
    rows = len(steps)
    if rows <= max(points, 3):
        return steps, columns
    stretches = max(1, (points - 1) // 2)
    edges = np.linspace(0, rows - 1, stretches + 1).astype(int)
    starts, ends = edges[:-1], edges[1:]
    positions = np.empty(2 * stretches + 1, dtype=int)
    positions[:-1:2], positions[1::2], positions[-1] = starts, ends - 1, rows - 1
    thin = {}
    for name, column in columns.items():
        if name == TIME:
            thin[name] = column[positions]
            continue
        values = np.empty(len(positions))
        values[:-1:2], values[1::2] = _extremes(column[:-1], starts)
        values[-1] = column[-1]
        thin[name] = values
    return steps[positions], thin


def _extremes(column: Column, starts: NDArray[np.int64]) -> tuple[Column, Column]:
    """Of each stretch its lowest and highest value, that which comes first first; NaN where it has no number."""
    low = np.fmin.reduceat(column, starts)
    high = np.fmax.reduceat(column, starts)
    lengths = np.diff(np.append(starts, len(column)))
    rows = np.arange(len(column))
    first_low = np.minimum.reduceat(np.where(column == np.repeat(low, lengths), rows, len(column)), starts)
    first_high = np.minimum.reduceat(np.where(column == np.repeat(high, lengths), rows, len(column)), starts)
    falls = first_high < first_low
    return np.where(falls, high, low), np.where(falls, low, high)


def numbers(values: Column) -> list[float | int | None]:
    """Numbers for JSON: None where there is none, whole ones as integers, others with `DIGITS` digits."""
    if not len(values):
        return []
    finite = np.isfinite(values)
    safe = np.where(finite, values, 0.0)
    if (safe == np.rint(safe)).all() and (np.abs(safe) < 2**53).all():
        shown: list[float | int | None] = safe.astype(np.int64).tolist()
    else:
        with np.errstate(divide="ignore"):
            exponent = np.floor(np.log10(np.abs(safe)))
        scale = 10.0 ** np.clip(DIGITS - 1 - np.where(np.isfinite(exponent), exponent, 0.0), -290, 290)
        shown = (np.rint(safe * scale) / scale).tolist()
    return shown if finite.all() else [value if is_one else None for value, is_one in zip(shown, finite, strict=True)]


def as_number(value: object) -> float:
    """The value as a float; NaN where it is no number, or beyond a float."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The names that a pattern matches, in the order of the patterns."""
    chosen: dict[str, None] = {}
    for pattern in patterns:
        if "*" in pattern:
            # Only `*` is special: names of rewards may hold brackets.
            escaped = pattern.replace("[", "[[]").replace("?", "[?]")
            chosen |= dict.fromkeys(name for name in names if fnmatch.fnmatchcase(name, escaped))
        elif pattern in names:
            chosen[pattern] = None
    return [name for name in chosen if name not in (TIME, STEP)]
