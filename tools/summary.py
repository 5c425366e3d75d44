"""`slipstream summary`: the metrics of a finished run as a table, and its curves as a picture."""

import argparse
import json
import math
import string
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from slipstream.configs.load import load_config
from slipstream.configs.paths import RunPaths, is_run_locked
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.configs.runtime.files import write_atomically
from slipstream.learner.metrics.summary import read_records
from slipstream.tools.cli import printable, table_console
from slipstream.tools.follow import MISSING, Record, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SECTIONS: tuple[tuple[tuple[str, str], ...], ...] = (
    (
        ("steps", "{steps:.0f} (policy version {policy_version:.0f})"),
        ("reward", "{reward_first:.3f} → {reward_last:.3f}"),
        ("evaluation", "{eval_score_first:.3f} → {eval_score:.3f} on held-out tasks"),
        ("of all tasks", "{eval_coverage:.0%} answered; failed ones as 0: {eval_lower_bound:.3f}"),
        ("to a score of 0.9", "{time_to_eval_0.9_s:.1f} s"),
    ),
    (
        ("wall clock", "{wall_s:.1f} s, of which start-up {startup_s:.1f} s"),
        ("evaluation", "{eval_s:.1f} s, while training went on"),
        ("per step", "{step_s_median:.3f} s (median)"),
        ("tokens", "{tokens_generated:,.0f} generated, {tokens_trained:,.0f} trained"),
        ("rate", "{tokens_trained_per_s:,.0f} tokens/s trained"),
        ("GPUs", "MFU {mfu:.1%}, {tokens_per_gpu_s:,.0f} tokens/s per GPU, {power_w:.0f} W"),
        ("cost", "{cost_per_million_tokens:.4g} per million trained tokens"),
        ("idle", "learner {learner_idle_fraction:.0%}, generator {generator_idle_fraction:.0%}"),
        ("weight sync", "mean {weight_sync_s.mean:.3f} s, max {weight_sync_s.max:.3f} s"),
        ("generation stall", "mean {generation_stall_s.mean:.3f} s, max {generation_stall_s.max:.3f} s"),
    ),
    (
        ("staleness", "mean {staleness_mean:.2f}, max {staleness_max:.0f} versions"),
        ("effective sample size", "{ess_mean:.3f}"),
        ("engine mismatch", "mean |Δ log-prob| {engine_mismatch_abs:.1e}, KL {engine_mismatch_kl:.1e}"),
    ),
)
"""Sections of the table: rows of a label and a template over the (dotted) keys of the summary."""
FILE_SECTIONS: tuple[tuple[tuple[str, str], ...], ...] = (
    (
        ("trainer", "{trainer}, {steps:.0f} steps, {epochs:.2f} epochs"),
        ("loss", "{loss_first:.4f} → {loss_last:.4f}"),
        ("validation loss", "{validation_loss_first:.4f} → {validation_loss_last:.4f}"),
        ("its least", "{validation_loss_best:.4f}"),
    ),
    (
        ("wall clock", "{wall_s:.1f} s, of which start-up {startup_s:.1f} s"),
        ("per step", "{step_s_median:.3f} s (median)"),
        ("trained", "{rows_trained:,.0f} rows, {tokens_trained:,.0f} tokens"),
        ("rate", "{tokens_trained_per_s:,.0f} tokens/s"),
        *(row for row in SECTIONS[1] if row[0] in ("GPUs", "cost")),
        ("idle", "{learner_idle_fraction:.0%}"),
    ),
)
"""The same of a training on rows of files."""
IF_KNOWN = ("GPUs", "cost")
"""Rows that a run without a GPU, or without a price, does not have."""
MIN_COLUMNS = 60
BLUE, ORANGE, GREEN, RED, GREY = "#2563c9", "#d9730d", "#1a8a5a", "#b3261e", "#6b7280"
Points = tuple[list[float], list[float]]
"""Steps and values."""
KEYS = {
    "kind", "step", "policy_version", "score", "lower_bound", "reward", "staleness_max", "staleness_mean",
    "learner_idle_fraction", "generator_idle_fraction", "step_s", "train_s", "weight_sync_s", "generation_stall_s",
    "loss", "lr", "grad_norm", "tokens_trained_per_s",
}  # fmt: skip
"""Keys of the metrics records that the picture shows, besides the score."""


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream summary`; returns 0. Raises: ConfigError when there is no such run, and as `report`."""
    # Imported here: `slipstream up` answers --help without Redis's client.
    from slipstream.tools.ledger.open import RUN_HELP, find_folder

    parser = argparse.ArgumentParser(
        prog="slipstream summary", description="Show a finished run's metrics and redraw its picture."
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    report(find_folder(parser.parse_args(argv).run))
    return 0


def report(folder: RunPaths) -> None:
    """Prints the summary and draws the picture.

    Raises: ConfigError if it is no run's folder, SlipstreamError if the run has no summary.
    """
    summary = read_summary(folder)
    if summary is None:
        raise _no_summary(folder)
    console = table_console(min_width=MIN_COLUMNS)
    console.print(summary_table(summary, title=folder.name))
    eval_reward = summary.get("eval_reward")
    try:
        records = read_records(folder.metrics, KEYS if eval_reward is None else KEYS | {score_key(eval_reward)})
        if draw_curves(records, eval_reward=eval_reward, title=folder.name, path=folder.curves):
            console.print(f"curves   {folder.curves}", highlight=False, soft_wrap=True)
    except OSError as error:
        console.print(f"curves   {folder.curves} can't be drawn: {error.strerror}", highlight=False, soft_wrap=True)
    if folder.export.exists():
        console.print(f"model    {folder.export}", highlight=False, soft_wrap=True)
    console.print(f"figures  {folder.summary}", highlight=False, soft_wrap=True)


def read_summary(folder: RunPaths) -> Any:
    """The metrics of a finished run; None for an unfinished one, also if a crash left an incomplete file."""
    try:
        summary = json.loads(folder.summary.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def extend_summary(folder: RunPaths, **entries: Any) -> None:
    """Adds entries to the summary of a finished run. Raises: OSError."""
    summary = read_summary(folder)
    if summary is not None:
        write_atomically(folder.summary, [json.dumps(summary | entries, indent=2).encode(), b"\n"])


def _no_summary(folder: RunPaths) -> SlipstreamError:
    """The reason, and the command that continues the run."""
    if not folder.config.is_file():
        return ConfigError(
            f"{folder.root} is no run's folder: it holds no {folder.config.name}; name one, such as runs/demo"
        )
    if is_run_locked(folder):
        return SlipstreamError(f"there is no {folder.summary} yet: the run is still going on")
    name = load_config(folder.config).run.name
    if folder.name == name:
        remedy = f"`slipstream up {folder.config} run.dir={folder.root.absolute().parent.resolve()}` continues it"
    else:  # it was moved aside
        remedy = f"to continue it, rename the folder to {name}"
    return SlipstreamError(f"there is no complete {folder.summary}: the run isn't finished; {remedy}")


def summary_table(summary: Mapping[str, Any], *, title: str) -> Table:
    """The metrics; a missing one shows as a dash, and so does a row without any."""
    table = Table(title=f"run {title}", show_header=False, title_style="bold", border_style="cyan")
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column()
    of_rows = "trainer" in summary
    for section in FILE_SECTIONS if of_rows else SECTIONS:
        for name, template in section:
            content = _filled(template, summary)
            if content != MISSING or name not in IF_KNOWN:
                table.add_row(name, content)
        table.add_section()
    if of_rows:
        dropped = summary.get("rows_dropped") or {}
        table.add_row("left out", ", ".join(f"{rows:,} rows {reason}" for reason, rows in dropped.items()) or "no row")
    else:
        table.add_row("groups", Text(printable(_group_counts(summary.get("groups") or {}))))
    if "uploads" in summary:
        table.add_row("uploads", _filled("{uploads.completed} completed, {uploads.given_up} given up", summary))
    return table


def _filled(template: str, summary: Mapping[str, Any]) -> str:
    formatter = _DashForMissing()
    values = [formatter.get_field(name, (), summary)[0] for _, name, _, _ in formatter.parse(template) if name]
    return MISSING if all(value is None for value in values) else formatter.vformat(template, (), summary)


def _group_counts(groups: Mapping[str, Any]) -> str:
    """Groups by state; of dropped groups also the reasons."""
    reasons: dict[str, list[str]] = {}
    for reason, count in (groups.get("reasons") or {}).items():
        state, _, name = reason.partition(":")
        reasons.setdefault(state, []).append(f"{count:,} {name}")
    counts = {state: count for state, count in groups.items() if isinstance(count, int)}
    return ", ".join(
        f"{count:,} {state}" + (f" ({', '.join(reasons[state])})" if state in reasons else "")
        for state, count in counts.items()
    )


class _DashForMissing(string.Formatter):
    """Fills `{a.b:spec}` from nested mappings; a missing or null value becomes a dash."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        if field_name in kwargs:  # as "time_to_eval_0.9_s", whose name has a dot
            return kwargs[field_name], field_name
        value: Any = kwargs
        for key in field_name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        return MISSING if value is None else format(value, format_spec)


# --- curves ----------------------------------------------------------------------------------------------------------


def score_key(eval_reward: str) -> str:
    """The metrics key of the evaluated reward, averaged over the training answers."""
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
        if any("reward" in step for step in steps):
            lower = below(evaluations(records, steps, "lower_bound"), evaluations(records, steps))
            _learning(axes[0, 0], steps, evaluations(records, steps), lower, eval_reward)
            _staleness(axes[0, 1], steps)
            _idle(axes[1, 0], steps)
        else:
            _loss(axes[0, 0], steps, measured(records))
            _single(axes[0, 1], points(steps, "grad_norm"), "norm of the gradient")
            _single(axes[1, 0], points(steps, "tokens_trained_per_s"), "tokens/s trained")
        _time(axes[1, 1], steps)
        for axis in axes[1]:
            axis.set_xlabel("step")
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
    return True


def last_of_each_step(records: Sequence[Record]) -> list[Record]:
    """Step records in order; of a step that was repeated after a restart, the later one."""
    steps = {int(record["step"]): record for record in records if record.get("kind") == "step" and "step" in record}
    return [steps[step] for step in sorted(steps)]


def evaluations(records: Sequence[Record], steps: Sequence[Record], key: str = "score") -> Points:
    """Greedy scores, at the step that made the evaluated policy version.

    Args:
        key: `score`, the mean over the answered tasks, or `lower_bound`, that over all, failed ones as 0.
    """
    step_of: dict[float, float] = {}
    for record in reversed(steps):
        version = number(record, "policy_version")
        if version is not None:
            step_of[version] = float(record["step"])
    step_of[0.0] = 0.0
    undone = {number(record, "policy_version") for record in records if record.get("kind") == "step"} - step_of.keys()
    scores: dict[float, float] = {}
    for record in records:
        version, score = number(record, "policy_version"), number(record, key)
        if record.get("kind") == "eval" and version is not None and score is not None and version not in undone:
            # No step made the version that a restart publishes: its evaluation is drawn at the step of its record.
            at = step_of.get(version, number(record, "step"))
            if at is not None:
                scores[at] = score
    return sorted(scores), [scores[step] for step in sorted(scores)]


def measured(records: Sequence[Record]) -> Points:
    """Losses on validation rows, by the steps that were done."""
    losses: dict[float, float] = {}
    for record in records:
        step, loss = number(record, "step"), number(record, "loss")
        if record.get("kind") == "eval" and step is not None and loss is not None:
            losses[step] = loss
    return sorted(losses), [losses[step] for step in sorted(losses)]


def below(lower: Points, scores: Points) -> Points:
    """The lower bounds, NaN at those that equal their score and have no neighbour that differs."""
    score_at = dict(zip(*scores, strict=True))
    # Without any answer there is no score.
    differs = [score_at.get(step) != bound for step, bound in zip(*lower, strict=True)]
    near = [any(differs[max(0, index - 1) : index + 2]) for index in range(len(differs))]
    return lower[0], [bound if shown else math.nan for bound, shown in zip(lower[1], near, strict=True)]


def points(steps: Sequence[Record], key: str) -> Points:
    """Step and value of the records that have the key."""
    measured = [(float(record["step"]), value) for record in steps if (value := number(record, key)) is not None]
    return [step for step, _ in measured], [value for _, value in measured]


def rolling_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of up to `window` values centred on each."""
    half, count = window // 2, len(values)
    sums = [0.0, *accumulate(values)]
    edges = [(max(0, index - half), min(count, index + half + 1)) for index in range(count)]
    return [(sums[end] - sums[start]) / (end - start) for start, end in edges]


def thinned(data: Points, most: int = 4000) -> Points:
    """At most `most` of the points, because a picture can't show more: the lowest and highest of each stretch."""
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
    """The values as a faint line, their rolling mean as a strong one."""
    if not data[0]:
        return
    window = max(1, len(data[0]) // 40)
    mean = data[0], rolling_mean(data[1], window)
    axis.plot(*thinned(data), color=colour, alpha=0.22, linewidth=0.8)
    axis.plot(*thinned(mean), color=colour, linewidth=1.7, label=label)


def _legend(axis: "Axes", *, columns: int = 1) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="best", ncols=columns)


def _learning(axis: "Axes", steps: Sequence[Record], greedy: Points, lower: Points, eval_reward: str | None) -> None:
    axis.set_title("reward")
    _line(axis, points(steps, "reward"), "reward (training)", BLUE)
    if eval_reward is not None:
        _line(axis, points(steps, score_key(eval_reward)), f"{eval_reward.replace('_', ' ')} (training)", ORANGE)
    if greedy[0]:
        axis.plot(*greedy, color=GREEN, marker="o", markersize=3.5, linewidth=1.3, label="evaluation")
        axis.annotate(
            f"{greedy[1][-1]:.3f}", (greedy[0][-1], greedy[1][-1]), xytext=(-5, 4),
            textcoords="offset points", color=GREEN, ha="right", fontsize=8,
        )  # fmt: skip
    if not all(map(math.isnan, lower[1])):
        axis.plot(*lower, color=GREEN, marker=".", markersize=3, linewidth=0.7, label="evaluation, failed tasks as 0")
    _legend(axis)


def _loss(axis: "Axes", steps: Sequence[Record], validation: Points) -> None:
    axis.set_title("loss")
    _line(axis, points(steps, "loss"), "training", BLUE)
    if validation[0]:
        axis.plot(*validation, color=GREEN, marker="o", markersize=3.5, linewidth=1.3, label="validation")
    _legend(axis)


def _single(axis: "Axes", data: Points, title: str) -> None:
    axis.set_title(title)
    _line(axis, data, title, BLUE)
    axis.set_ylim(bottom=0)


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
        # The first step, and steps that wait for a checkpoint, may be so long that all others look like 0.
        highest = max([highest, *sorted(data[1])[: max(1, int(0.97 * len(data[1])))]])
    axis.set_ylim(0, 1.3 * highest if highest else None)
    _legend(axis, columns=2)
