"""Draws a run as one picture: does it learn, how stale is its data, who idles, what does a step cost."""

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.tools.follow import Record, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, RED, GREY = "#2563c9", "#d9730d", "#1a8a5a", "#b3261e", "#6b7280"
Points = tuple[list[float], list[float]]
KEYS = {
    "kind", "step", "policy_version", "score", "reward", "staleness_max", "staleness_mean", "learner_idle_fraction",
    "generator_idle_fraction", "step_s", "train_s", "weight_sync_s", "generation_stall_s",
}  # fmt: skip
"""What the picture shows of the records, besides the score."""


def score_key(eval_reward: str) -> str:
    """The key of the training answers' mean score by the reward that is evaluated."""
    return f"score/{eval_reward}"


def draw_curves(records: Sequence[Record], *, eval_reward: str | None, title: str, path: Path) -> bool:
    """Draws metrics records into a PNG; returns False, and draws nothing, when no step is among them."""
    steps = last_of_each_step(records)
    if not steps:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({
        "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
        "legend.frameon": False, "legend.fontsize": 8,
    }):  # fmt: skip
        figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
        figure.suptitle(f"{title}: {len(steps)} steps", fontsize=13, fontweight="bold")
        _learning(axes[0, 0], steps, evaluations(records, steps), eval_reward)
        _staleness(axes[0, 1], steps)
        _idle(axes[1, 0], steps)
        _time(axes[1, 1], steps)
        for axis in axes[1]:
            axis.set_xlabel("step")
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
    return True


def last_of_each_step(records: Sequence[Record]) -> list[Record]:
    """Step records in order; of a step that was done again after a restart, the later one."""
    steps = {int(record["step"]): record for record in records if record.get("kind") == "step" and "step" in record}
    return [steps[step] for step in sorted(steps)]


def evaluations(records: Sequence[Record], steps: Sequence[Record]) -> Points:
    """Greedy scores over the step that made the evaluated policy version."""
    step_of: dict[float, float] = {}
    for record in reversed(steps):
        version = number(record, "policy_version")
        if version is not None:
            step_of[version] = float(record["step"])
    step_of[0.0] = 0.0
    undone = {number(record, "policy_version") for record in records if record.get("kind") == "step"} - step_of.keys()
    scores: dict[float, float] = {}
    for record in records:
        version, score = number(record, "policy_version"), number(record, "score")
        if record.get("kind") == "eval" and version is not None and score is not None and version not in undone:
            # What was published at a restart is of no step: its evaluation is drawn where it came in.
            at = step_of.get(version, number(record, "step"))
            if at is not None:
                scores[at] = score
    return sorted(scores), [scores[step] for step in sorted(scores)]


def points(steps: Sequence[Record], key: str) -> Points:
    """Step and value of the records that have the key."""
    found = [(float(record["step"]), value) for record in steps if (value := number(record, key)) is not None]
    return [step for step, _ in found], [value for _, value in found]


def rolling_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of up to `window` values centred on each."""
    half, count = window // 2, len(values)
    sums = [0.0, *accumulate(values)]
    edges = [(max(0, index - half), min(count, index + half + 1)) for index in range(count)]
    return [(sums[end] - sums[start]) / (end - start) for start, end in edges]


def thinned(data: Points, most: int = 4000) -> Points:
    """At most so many of the points, more than which a picture can't show: of each stretch the lowest and highest."""
    count = len(data[0])
    if count <= most:
        return data
    stretch = 2 * math.ceil(count / most)
    kept: list[int] = []
    for start in range(0, count, stretch):
        part = range(start, min(start + stretch, count))
        kept += sorted({min(part, key=data[1].__getitem__), max(part, key=data[1].__getitem__)})
    return [data[0][index] for index in kept], [data[1][index] for index in kept]


def _line(axis: "Axes", data: Points, label: str, colour: str) -> None:
    """A faint line of what was measured under a strong one of its rolling mean."""
    if not data[0]:
        return
    window = max(1, len(data[0]) // 40)
    mean = data[0], rolling_mean(data[1], window)
    axis.plot(*thinned(data), color=colour, alpha=0.22, linewidth=0.8)
    axis.plot(*thinned(mean), color=colour, linewidth=1.7, label=label)


def _legend(axis: "Axes", *, columns: int = 1) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="best", ncols=columns)


def _learning(axis: "Axes", steps: Sequence[Record], greedy: Points, eval_reward: str | None) -> None:
    axis.set_title("reward")
    _line(axis, points(steps, "reward"), "reward (training)", BLUE)
    if eval_reward is not None:
        _line(axis, points(steps, score_key(eval_reward)), f"{eval_reward.replace('_', ' ')} (training)", ORANGE)
    if greedy[0]:
        axis.plot(*greedy, color=GREEN, marker="o", markersize=3.5, linewidth=1.3, label="greedy evaluation")
        axis.annotate(
            f"{greedy[1][-1]:.3f}", (greedy[0][-1], greedy[1][-1]), xytext=(-5, 4),
            textcoords="offset points", color=GREEN, ha="right", fontsize=8,
        )  # fmt: skip
    _legend(axis)


def _staleness(axis: "Axes", steps: Sequence[Record]) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_title("staleness (versions)")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    highest = thinned(points(steps, "staleness_max"))
    axis.plot(*highest, color=GREY, marker=".", markersize=4, linestyle="", label="max")
    _line(axis, points(steps, "staleness_mean"), "mean", BLUE)
    axis.set_ylim(bottom=0)
    _legend(axis)


def _idle(axis: "Axes", steps: Sequence[Record]) -> None:
    axis.set_title("idle share of time")
    _line(axis, points(steps, "learner_idle_fraction"), "learner waits for groups", BLUE)
    _line(axis, points(steps, "generator_idle_fraction"), "generator waits for tickets", ORANGE)
    axis.set_ylim(0, 1)
    axis.yaxis.set_major_formatter("{x:.0%}")
    _legend(axis)


def _time(axis: "Axes", steps: Sequence[Record]) -> None:
    axis.set_title("seconds")
    highest = 0.0
    for key, label, colour in (
        ("step_s", "whole step", BLUE),
        ("train_s", "training in it", GREEN),
        ("weight_sync_s", "weight sync", ORANGE),
        ("generation_stall_s", "generation stall", RED),
    ):
        data = points(steps, key)
        _line(axis, data, label, colour)
        # The first step, and those that wait for a checkpoint, may be so long that all others look like 0.
        highest = max([highest, *sorted(data[1])[: max(1, int(0.97 * len(data[1])))]])
    axis.set_ylim(0, 1.3 * highest if highest else None)
    _legend(axis, columns=2)
