"""The result as a picture: a panel for each lag, a line for each objective, its seeds as a band."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from slipstream.tools.bench.staleness.curves import Curves
from slipstream.tools.bench.staleness.studies import Study
from slipstream.tools.bench.staleness.workers import Outcome
from slipstream.tools.report import rolling_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHED: Final = 9
"""Versions: the noise of 256 answers is not what the picture is about."""

# Okabe and Ito's palette, which colour-blind readers tell apart; dashes for those who print in grey.
_STYLES: Final = (
    ("#000000", "-"), ("#0072b2", "-"), ("#e69f00", (0, (5, 1.5))), ("#009e73", (0, (3, 1, 1, 1))),
    ("#cc79a7", (0, (1.5, 1))), ("#d55e00", (0, (6, 1, 1, 1, 1, 1))),
)  # fmt: skip


def draw(study: Study, outcomes: Sequence[Outcome], path: Path) -> None:
    """Draws the rewards into a PNG, and under them the effective lag where a throttle has changed it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    lags = sorted({outcome.run.lag for outcome in outcomes})
    throttled = any(lag != outcome.run.lag for outcome in outcomes for lag in outcome.curves.lags)
    with pyplot.rc_context({
        "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
        "legend.frameon": False,
    }):  # fmt: skip
        heights = [3.2, 1.6] if throttled else [3.2]
        width = (3.3 if len(lags) > 2 else 4.6) * max(len(lags), 2)
        figure, axes = pyplot.subplots(
            len(heights), len(lags), figsize=(width, sum(heights) + 0.9),
            sharex=True, sharey="row", squeeze=False, layout="constrained", height_ratios=heights,
        )  # fmt: skip
        figure.suptitle(f"Trained on answers that are k steps old: {study.title}", fontweight="bold")
        for column, lag in enumerate(lags):
            of_lag = [outcome for outcome in outcomes if outcome.run.lag == lag]
            _rewards(axes[0, column], study, of_lag, f"k = {lag}")
            if throttled:
                _effective_lags(axes[1, column], study, of_lag)
            axes[-1, column].set_xlabel("step")
        axes[0, 0].set_ylabel("reward of fresh answers")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(3, len(labels), int(width / 4.4)), handlelength=3
        )
        figure.savefig(path, dpi=140)
        pyplot.close(figure)


def _rewards(axis: "Axes", study: Study, outcomes: Sequence[Outcome], title: str) -> None:
    axis.set_title(title)
    axis.set_ylim(-0.02, 1.03)
    for line, (colour, dashes), curves in _lines(study, outcomes):
        smooth = [rolling_mean(each.rewards, SMOOTHED) for each in curves]
        steps = range(len(smooth[0]))
        at_each = list(zip(*smooth, strict=True))
        axis.fill_between(
            steps, [min(each) for each in at_each], [max(each) for each in at_each],
            color=colour, alpha=0.13, linewidth=0,
        )  # fmt: skip
        mean = [sum(each) / len(each) for each in at_each]
        axis.plot(steps, mean, color=colour, linestyle=dashes, linewidth=1.6, label=study.lines[line].title)
    halfway = len(outcomes[0].curves.lags) / 2
    axis.axvline(halfway, color="#6b7280", linewidth=0.8, linestyle=":", zorder=0)
    axis.text(halfway, -0.01, " halfway", color="#6b7280", fontsize=7)


def _effective_lags(axis: "Axes", study: Study, outcomes: Sequence[Outcome]) -> None:
    axis.set_title("effective lag", fontweight="normal")
    for _, (colour, dashes), curves in _lines(study, outcomes):
        for each in curves:
            axis.plot(each.lags, color=colour, linestyle=dashes, linewidth=1.2)


def _lines(study: Study, outcomes: Sequence[Outcome]) -> Iterator[tuple[str, tuple[str, Any], list[Curves]]]:
    """Each line that was run, how it is drawn, and its seeds' curves."""
    for line, style in zip(study.lines, _STYLES, strict=False):
        curves = [outcome.curves for outcome in outcomes if outcome.run.line == line]
        if curves:
            yield line, style, curves
