"""Results of the staleness bench: the reward curve of each run, a table and a picture of all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from slipstream.tools.bench.figures import Figure
from slipstream.tools.report import rolling_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOW = 10
"""Versions whose rewards are averaged: the mean of one version's 256 answers is noisy."""
SMOOTHING = 9
"""Versions that a point of the picture averages."""
UNEVEN = 0.1
"""If the last rewards of the seeds are further apart than this, the table shows their range beside the mean."""

# Okabe and Ito's palette, which colour-blind readers can tell apart; dashes for prints in grey.
_STYLES = (
    ("#000000", "-"), ("#0072b2", "-"), ("#e69f00", (0, (5, 1.5))), ("#009e73", (0, (3, 1, 1, 1))),
    ("#cc79a7", (0, (1.5, 1))), ("#d55e00", (0, (6, 1, 1, 1, 1, 1))),
)  # fmt: skip


@dataclass
class Curves:
    """Measurements of one run."""

    rewards: list[float] = field(default_factory=list)
    """Mean reward of fresh answers before each step, and after the last."""
    lags: list[int] = field(default_factory=list)
    """Lag in force at each step: a throttle may lower it."""
    figures: dict[str, list[float]] = field(default_factory=dict)
    """The learner's metrics of each step."""
    dropped: int = 0
    """Groups that were dropped when the lag fell."""
    seconds: float = 0.0

    @property
    def halfway(self) -> float:
        """Reward after half of the steps."""
        middle = len(self.rewards) // 2
        return fmean(self.rewards[max(0, middle - WINDOW + 1) : middle + 1])

    @property
    def end(self) -> float:
        """Reward after the last step."""
        return fmean(self.rewards[-WINDOW:])

    @property
    def area(self) -> float:
        """Mean reward over the run."""
        return fmean(self.rewards)


@dataclass(frozen=True)
class Result:
    """The curves of one run."""

    objective: str
    lag: int
    seed: int
    curves: Curves


@dataclass(frozen=True)
class Cell:
    """One objective at one lag, averaged over its seeds."""

    halfway: float
    end: float
    area: float
    end_range: tuple[float, float]

    @classmethod
    def of(cls, curves: Sequence[Curves]) -> "Cell":
        """Means of at least one run."""
        ends = [each.end for each in curves]
        halfway, area = (fmean(getattr(each, name) for each in curves) for name in ("halfway", "area"))
        return cls(halfway, fmean(ends), area, (min(ends), max(ends)))

    def __str__(self) -> str:
        low, high = self.end_range
        spread = f" ({low:.2f} to {high:.2f})" if high - low > UNEVEN else ""
        return f"{self.halfway:.2f} / {self.end:.2f}{spread} / {self.area:.2f}"


Cells = Mapping[str, Mapping[int, Cell]]
"""By objective and lag."""


def cells(titles: Mapping[str, str], results: Sequence[Result]) -> Cells:
    """The contents of the table. Every objective in `results` ran at all of their lags."""
    lags = sorted({result.lag for result in results})
    ran = {result.objective for result in results}
    return {
        name: {lag: Cell.of([r.curves for r in results if (r.objective, r.lag) == (name, lag)]) for lag in lags}
        for name in titles
        if name in ran
    }


def markdown_table(titles: Mapping[str, str], table: Cells) -> str:
    """A row for each objective, a column for each lag."""
    lags = list(next(iter(table.values())))
    rows = [["objective", *(f"k = {lag}" for lag in lags)], ["---"] * (1 + len(lags))]
    rows += [[titles[name], *map(str, row.values())] for name, row in table.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def figures(table: Cells) -> list[Figure]:
    """For the file."""
    return [
        Figure(f"{objective}, k = {lag}, {name}", getattr(cell, name), "")
        for objective, row in table.items()
        for lag, cell in row.items()
        for name in ("halfway", "end", "area")
    ]


def draw(title: str, titles: Mapping[str, str], results: Sequence[Result], path: Path) -> None:
    """Draws a PNG: a panel of rewards for each lag, and below it the effective lags if a throttle changed any."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    lags = sorted({result.lag for result in results})
    throttled = any(lag != result.lag for result in results for lag in result.curves.lags)
    heights = [3.2, 1.6] if throttled else [3.2]
    width = (3.3 if len(lags) > 2 else 4.6) * max(len(lags), 2)
    with pyplot.rc_context({
        "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
        "legend.frameon": False,
    }):  # fmt: skip
        figure, axes = pyplot.subplots(
            len(heights), len(lags), figsize=(width, sum(heights) + 0.9),
            sharex=True, sharey="row", squeeze=False, layout="constrained", height_ratios=heights,
        )  # fmt: skip
        figure.suptitle(f"Trained on answers that are k steps old: {title}", fontweight="bold")
        for column, lag in enumerate(lags):
            _draw_panel(list(axes[:, column]), titles, [result for result in results if result.lag == lag])
        axes[0, 0].set_ylabel("reward of fresh answers")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        columns = min(3, len(labels), int(width / 4.4))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=3)
        figure.savefig(path, dpi=140)
        pyplot.close(figure)


def _draw_panel(axes: "Sequence[Axes]", titles: Mapping[str, str], results: Sequence[Result]) -> None:
    """One lag: the rewards, and the effective lags if there is a second axis."""
    top, *bottom = axes
    top.set_title(f"k = {results[0].lag}")
    top.set_ylim(-0.02, 1.03)
    axes[-1].set_xlabel("step")
    for (name, title), (colour, dashes) in zip(titles.items(), _STYLES, strict=True):
        curves = [result.curves for result in results if result.objective == name]
        if not curves:
            continue
        by_step = list(zip(*(rolling_mean(each.rewards, SMOOTHING) for each in curves), strict=True))
        low, high = [min(each) for each in by_step], [max(each) for each in by_step]
        top.fill_between(range(len(by_step)), low, high, color=colour, alpha=0.13, linewidth=0)
        top.plot([fmean(each) for each in by_step], color=colour, linestyle=dashes, linewidth=1.6, label=title)
        for axis in bottom:
            axis.set_title("effective lag", fontweight="normal")
            for each in curves:
                axis.plot(each.lags, color=colour, linestyle=dashes, linewidth=1.2)
    halfway = len(results[0].curves.lags) / 2
    top.axvline(halfway, color="#6b7280", linewidth=0.8, linestyle=":", zorder=0)
    top.text(halfway, -0.01, " halfway", color="#6b7280", fontsize=7)
