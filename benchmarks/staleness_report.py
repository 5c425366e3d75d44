"""Results of the staleness bench: the curves of each run, a table and a picture of all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True)
class Run:
    """One training run of a study."""

    objective: str
    lag: int
    seed: int


@dataclass
class Curves:
    """Measurements of one run."""

    rewards: list[float] = field(default_factory=list)
    """Mean reward of fresh answers before each step, and after the last."""
    lags: list[int] = field(default_factory=list)
    """Lag in force at each step: a throttle may lower it."""
    figures: dict[str, list[float]] = field(default_factory=dict)
    """The learner's metrics of each step."""
    seconds: float = 0.0

    @property
    def end(self) -> float:
        """Reward after the last step."""
        return fmean(self.rewards[-WINDOW:])

    @property
    def area(self) -> float:
        """Mean reward over the run."""
        return fmean(self.rewards)


Results = Mapping[Run, Curves]


@dataclass(frozen=True)
class Cell:
    """One objective at one lag: a value for each seed."""

    ends: Sequence[float]
    areas: Sequence[float]

    def __str__(self) -> str:
        low, high = min(self.ends), max(self.ends)
        spread = f" ({low:.2f} to {high:.2f})" if high - low > UNEVEN else ""
        return f"{fmean(self.ends):.2f}{spread} / {fmean(self.areas):.2f}"


def table(results: Results) -> dict[str, dict[int, Cell]]:
    """Cells by objective and lag, ascending. Every objective ran at all lags."""
    cells: dict[str, dict[int, Cell]] = {}
    for name, lag in sorted({(run.objective, run.lag) for run in results}, key=lambda place: place[1]):
        curves = [each for run, each in results.items() if (run.objective, run.lag) == (name, lag)]
        cells.setdefault(name, {})[lag] = Cell([each.end for each in curves], [each.area for each in curves])
    return cells


def markdown(titles: Mapping[str, str], cells: Mapping[str, Mapping[int, Cell]]) -> str:
    """A row for each objective, a column for each lag."""
    lags = list(next(iter(cells.values())))
    rows = [["objective", *(f"k = {lag}" for lag in lags)], ["---"] * (1 + len(lags))]
    rows += [[title, *map(str, cells[name].values())] for name, title in titles.items() if name in cells]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def draw(title: str, titles: Mapping[str, str], results: Results, path: Path) -> None:
    """Draws a PNG: a panel of rewards for each lag, and below it the effective lags if a throttle changed any."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    lags = sorted({run.lag for run in results})
    throttled = any(lag != run.lag for run, curves in results.items() for lag in curves.lags)
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
            axes[0, column].set_title(f"k = {lag}")
            for (name, label), (colour, dashes) in zip(titles.items(), _STYLES, strict=True):
                curves = [each for run, each in results.items() if (run.objective, run.lag) == (name, lag)]
                if curves:
                    _draw_objective(list(axes[:, column]), label, curves, colour=colour, dashes=dashes)
        axes[0, 0].set_ylabel("reward of fresh answers")
        axes[0, 0].set_ylim(-0.02, 1.03)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        columns = min(3, len(labels), int(width / 4.4))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=3)
        figure.savefig(path, dpi=140)
        pyplot.close(figure)


def _draw_objective(axes: "Sequence[Axes]", label: str, curves: Sequence[Curves], *, colour: str, dashes: Any) -> None:
    """One objective at one lag: the rewards, and the effective lags if there is a second axis."""
    top, *bottom = axes
    axes[-1].set_xlabel("step")
    by_step = list(zip(*(rolling_mean(each.rewards, SMOOTHING) for each in curves), strict=True))
    low, high = [min(each) for each in by_step], [max(each) for each in by_step]
    style: Any = {"color": colour, "linestyle": dashes}
    top.fill_between(range(len(by_step)), low, high, color=colour, alpha=0.13, linewidth=0)
    top.plot([fmean(each) for each in by_step], linewidth=1.6, label=label, **style)
    for axis in bottom:
        axis.set_title("effective lag", fontweight="normal")
        for each in curves:
            axis.plot(each.lags, linewidth=1.2, **style)
