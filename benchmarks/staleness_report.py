"""Curves of the staleness runs, a table and a picture of all."""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes

from slipstream.tools.summary import rolling_mean

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


Cells = Mapping[str, Mapping[int, Sequence[Curves]]]
"""The curves of each seed, by objective and lag, ascending."""


def table(results: Results) -> Cells:
    """The results by objective and lag."""
    cells: dict[str, dict[int, list[Curves]]] = {}
    for run in sorted(results, key=lambda run: run.lag):
        cells.setdefault(run.objective, {}).setdefault(run.lag, []).append(results[run])
    return cells


def thinned(curves: Curves) -> dict[str, Any]:
    """A run's measurements in little space: rewards averaged over `WINDOW` versions, the mean of each metric."""
    blocks = [curves.rewards[start : start + WINDOW] for start in range(0, len(curves.rewards), WINDOW)]
    return {
        "end": round(curves.end, 4),
        "area": round(curves.area, 4),
        "rewards": [round(fmean(block), 3) for block in blocks],
        "least_lag": min(curves.lags),
        "figures": {name: fmean(values) for name, values in curves.figures.items()},
        "seconds": round(curves.seconds, 1),
    }


def markdown(titles: Mapping[str, str], cells: Cells, *, seeds: int) -> str:
    """A row for each objective, a column for each lag: reward at the end / area.

    Args:
        seeds: number of runs of a whole cell; a smaller number is shown.
    """
    lags = sorted({lag for row in cells.values() for lag in row})
    rows = [["objective", *(f"k = {lag}" for lag in lags)], ["---"] * (1 + len(lags))]
    for name, title in titles.items():
        if name in cells:
            rows.append([title, *(_cell(cells[name].get(lag, ()), seeds) for lag in lags)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(curves: Sequence[Curves], seeds: int) -> str:
    if not curves:
        return "-"
    ends = [each.end for each in curves]
    low, high = min(ends), max(ends)
    spread = f" ({low:.2f} to {high:.2f})" if high - low > UNEVEN else ""
    fewer = f" (n = {len(curves)})" if len(curves) < seeds else ""
    return f"{fmean(ends):.2f}{spread} / {fmean(each.area for each in curves):.2f}{fewer}"


def plottable(objectives: Sized) -> bool:
    """True if each objective can have a colour and a dash of its own."""
    return len(objectives) <= len(_STYLES)


def draw(title: str, titles: Mapping[str, str], cells: Cells, path: Path) -> None:
    """Draws a PNG: a panel of rewards for each lag, and below it the effective lags if a throttle changed any."""
    mpl.use("Agg")
    from matplotlib import pyplot

    lags = sorted({lag for row in cells.values() for lag in row})
    throttled = any(set(each.lags) != {lag} for row in cells.values() for lag, seeds in row.items() for each in seeds)
    heights = [3.2, 1.6] if throttled else [3.2]
    width = (3.3 if len(lags) > 2 else 4.6) * max(len(lags), 2)
    style: Any = {
        "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
        "legend.frameon": False,
    }  # fmt: skip
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(
            len(heights), len(lags), figsize=(width, sum(heights) + 0.9),
            sharex=True, sharey="row", squeeze=False, layout="constrained", height_ratios=heights,
        )  # fmt: skip
        figure.suptitle(f"Trained on answers that are k steps old: {title}", fontweight="bold")
        for column, lag in enumerate(lags):
            axes[0, column].set_title(f"k = {lag}")
            for (name, label), (colour, dashes) in zip(titles.items(), _STYLES, strict=False):
                if curves := cells.get(name, {}).get(lag):
                    line = {"color": colour, "linestyle": dashes}
                    _draw_objective(list(axes[:, column]), label, curves, line)
        axes[0, 0].set_ylabel("reward of fresh answers")
        axes[0, 0].set_ylim(-0.02, 1.03)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        columns = min(3, len(labels), int(width / 4.4))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=3)
        figure.savefig(path, dpi=140)
        pyplot.close(figure)


def _draw_objective(axes: Sequence[Axes], label: str, curves: Sequence[Curves], line: Any) -> None:
    """One objective at one lag: the rewards, and the effective lags if there is a second axis."""
    top, *bottom = axes
    axes[-1].set_xlabel("step")
    by_step = list(zip(*(rolling_mean(each.rewards, SMOOTHING) for each in curves), strict=True))
    low, high = [min(each) for each in by_step], [max(each) for each in by_step]
    top.fill_between(range(len(by_step)), low, high, color=line["color"], alpha=0.13, linewidth=0)
    top.plot([fmean(each) for each in by_step], linewidth=1.6, label=label, **line)
    for axis in bottom:
        axis.set_title("effective lag", fontweight="normal")
        for each in curves:
            axis.plot(each.lags, linewidth=1.2, **line)
