"""`slipstream summary`: a finished run's figures as a table, and its picture."""

import argparse
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from slipstream.configs.load import load_config
from slipstream.configs.paths import RunFolder, is_claimed
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.learner.metrics.summary import read_records
from slipstream.tools.arguments import table_console
from slipstream.tools.launch.opening import read_summary
from slipstream.tools.launch.progress import MISSING

PARTS: tuple[tuple[tuple[str, str], ...], ...] = (
    (
        ("steps", "{steps:.0f} (policy version {policy_version:.0f})"),
        ("reward", "{reward_first:.3f} → {reward_last:.3f}"),
        ("greedy evaluation", "{eval_score_first:.3f} → {eval_score:.3f} on held-out tasks"),
        ("to greedy 0.9", "{time_to_eval_0.9_s:.1f} s"),
    ),
    (
        ("wall clock", "{wall_s:.1f} s, of which start-up {startup_s:.1f} s"),
        ("evaluation", "{eval_s:.1f} s, while training went on"),
        ("per step", "{step_s_median:.3f} s (median)"),
        ("tokens", "{tokens_generated:,.0f} generated, {tokens_trained:,.0f} trained"),
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
"""What is shown, in parts: rows of a name and a template over the (dotted) keys of the summary."""
NARROWEST = 60
"""Columns that the figures need."""


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream summary`; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="slipstream summary", description="Show a finished run's figures and redraw its picture."
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN_FOLDER", help="such as runs/demo")
    report(RunFolder(parser.parse_args(argv).run_folder))
    return 0


def report(folder: RunFolder) -> None:
    """Prints the summary and draws the picture.

    Raises: ConfigError if it is no run's folder, SlipstreamError if the run has no summary.
    """
    from slipstream.tools.curves import KEYS, draw_curves, score_key

    summary = read_summary(folder)
    if summary is None and not folder.config.is_file():
        raise ConfigError(
            f"{folder.root} is no run's folder: it holds no {folder.config.name}; name one, such as runs/demo"
        )
    if summary is None and is_claimed(folder):
        raise SlipstreamError(f"there is no {folder.summary} yet: the run is going on")
    if summary is None:
        raise SlipstreamError(f"there is no whole {folder.summary}: the run isn't finished; {_how_to_go_on(folder)}")
    console = table_console(narrowest=NARROWEST)
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


def _how_to_go_on(folder: RunFolder) -> str:
    """In words; the folder may have been named from elsewhere, or moved aside."""
    name = load_config(folder.config).run.name
    if folder.name != name:
        return f"to continue it, rename the folder to {name}"
    return f"`slipstream up {folder.config} run.dir={folder.root.absolute().parent.resolve()}` continues it"


def summary_table(summary: Mapping[str, Any], *, title: str) -> Table:
    """The figures, in parts; a figure that the summary lacks shows as a dash, and so does a row that lacks all."""
    table = Table(title=f"run {title}", show_header=False, title_style="bold", border_style="cyan")
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column()
    for part in PARTS:
        for name, template in part:
            table.add_row(name, _filled(template, summary))
        table.add_section()
    table.add_row("groups", _in_words(summary.get("groups") or {}))
    return table


def _filled(template: str, summary: Mapping[str, Any]) -> str:
    formatter = _DashForMissing()
    figures = [formatter.get_field(name, (), summary)[0] for _, name, _, _ in formatter.parse(template) if name]
    return MISSING if all(figure is None for figure in figures) else formatter.vformat(template, (), summary)


def _in_words(groups: Mapping[str, Any]) -> str:
    """How many groups are in each state; of those that were dropped also why."""
    why: dict[str, list[str]] = {}
    for reason, count in (groups.get("reasons") or {}).items():
        state, _, name = reason.partition(":")
        why.setdefault(state, []).append(f"{count:,} {name}")
    counts = {state: count for state, count in groups.items() if isinstance(count, int)}
    return ", ".join(
        f"{count:,} {state}" + (f" ({', '.join(why[state])})" if state in why else "")
        for state, count in counts.items()
    )


class _DashForMissing(string.Formatter):
    """Fills `{a.b:spec}` from nested mappings; what is missing or null becomes a dash."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        if field_name in kwargs:  # as "time_to_eval_0.9_s", whose name has a dot
            return kwargs[field_name], field_name
        value: Any = kwargs
        for key in field_name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        return MISSING if value is None else format(value, format_spec)
