"""The result as a table: reward halfway, at the end, and the area under its curve; for terminals and for Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from rich.table import Table

from slipstream.tools.bench.figures import Figure
from slipstream.tools.bench.staleness.curves import Curves
from slipstream.tools.bench.staleness.studies import Study
from slipstream.tools.bench.staleness.workers import Outcome

UNEVEN: Final = 0.1
"""Seeds whose last rewards are further apart than this are no mean's worth: their range is shown too."""


@dataclass(frozen=True)
class Cell:
    """One line at one lag, over its seeds."""

    halfway: float
    end: float
    area: float
    ends: tuple[float, float]
    """Lowest and highest reward at the end."""

    @classmethod
    def of(cls, curves: Sequence[Curves]) -> "Cell":
        """Means of at least one run."""
        ends = [each.end for each in curves]
        return cls(
            halfway=fmean(each.halfway for each in curves),
            end=fmean(ends),
            area=fmean(each.area for each in curves),
            ends=(min(ends), max(ends)),
        )

    def __str__(self) -> str:
        low, high = self.ends
        spread = f" ({low:.2f} to {high:.2f})" if high - low > UNEVEN else ""
        return f"{self.halfway:.2f} / {self.end:.2f}{spread} / {self.area:.2f}"


Cells = Mapping[str, Mapping[int, Cell]]
"""Line → lag → cell, in the order of the study."""


def cells(study: Study, outcomes: Sequence[Outcome]) -> Cells:
    """The table's contents, of those lines and lags that were run."""
    lags = sorted({outcome.run.lag for outcome in outcomes})
    lines = {outcome.run.line for outcome in outcomes}
    return {
        line: {lag: Cell.of(_of(outcomes, line, lag)) for lag in lags if _of(outcomes, line, lag)}
        for line in study.lines
        if line in lines
    }


def screen_table(study: Study, found: Cells) -> Table:
    """For terminals."""
    table = Table(title=f"{study.title}: reward halfway / at the end / area", title_style="bold", border_style="cyan")
    table.add_column("objective", style="bold cyan")
    for lag in _lags(found):
        table.add_column(f"k = {lag}", justify="right")
    for line, row in found.items():
        table.add_row(study.lines[line].title, *(str(row[lag]) for lag in _lags(found)))
    return table


def markdown_table(study: Study, found: Cells) -> str:
    """For the documentation."""
    lags = _lags(found)
    rows = [
        ["objective", *(f"k = {lag}" for lag in lags)],
        ["---", *("---" for _ in lags)],
        *([study.lines[line].title, *(str(row[lag]) for lag in lags)] for line, row in found.items()),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def figures(found: Cells) -> list[Figure]:
    """For the file."""
    return [
        Figure(f"{line}, k = {lag}, {name}", getattr(cell, name), "")
        for line, row in found.items()
        for lag, cell in row.items()
        for name in ("halfway", "end", "area")
    ]


def _of(outcomes: Sequence[Outcome], line: str, lag: int) -> list[Curves]:
    return [outcome.curves for outcome in outcomes if (outcome.run.line, outcome.run.lag) == (line, lag)]


def _lags(found: Cells) -> list[int]:
    return list(next(iter(found.values())))
