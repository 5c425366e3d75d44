"""The report on a run's ledger, as tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from slipstream.buffer.wire.messages import LedgerCounts
from slipstream.tools.ledger.words import groups_by_state, printable, titled

TRAINED = "trained"


@dataclass(frozen=True)
class Report:
    """What the report says."""

    run: str
    counts: LedgerCounts
    length_bias: Mapping[str, float]
    """Kolmogorov-Smirnov distance of the lengths of trained, and of dropped answers by reason, from all delivered; of
    those whose lengths are known.
    """
    outcomes: Mapping[str, int]
    """Tasks by the outcome of their latest group."""
    latest: Mapping[str, Sequence[str]]
    """By state, the ids that were issued last, newest first."""


def report_tables(report: Report) -> list[RenderableType]:
    """Groups by state; then, where there is something to tell, reasons, lengths, and tasks."""
    tables: list[RenderableType] = [titled(f"run {report.run}: {report.counts.issued:,} groups", _states(report))]
    if report.counts.reasons:
        tables.append(titled("groups dropped", _reasons(report.counts.reasons)))
    if report.counts.uses or report.counts.answers_dropped:
        tables.append(titled("length bias", _lengths(report)))
    if report.outcomes:
        tables.append(titled("tasks, by their latest group", _outcomes(report.outcomes)))
    return tables


def _states(report: Report) -> Table:
    table = _table("state")
    table.add_column("groups", justify="right")
    table.add_column("latest ids")
    for state, number in groups_by_state(report.counts).items():
        table.add_row(state, f"{number:,}", " ".join(report.latest[state]))
    return table


def _lengths(report: Report) -> Table:
    table = _table("answers")
    table.add_column("how many", justify="right")
    table.add_column("KS distance of their lengths from all", justify="right")
    for name in (TRAINED, *sorted(report.counts.answers_dropped)):
        dropped, distance = report.counts.answers_dropped.get(name), report.length_bias.get(name)
        words = TRAINED if name == TRAINED else f"dropped: {name}"
        table.add_row(
            Text(printable(words)),
            "" if dropped is None else f"{dropped:,}",
            "" if distance is None else f"{distance:.3f}",
        )
    return table


def _reasons(counts: Mapping[str, int]) -> Table:
    table = _table("reason")
    table.add_column("groups", justify="right")
    for name, number in sorted(counts.items(), key=lambda item: -item[1]):
        table.add_row(Text(printable(name)), f"{number:,}")
    return table


def _outcomes(counts: Mapping[str, int]) -> Table:
    total = sum(counts.values())
    table = _table("outcome")
    table.add_column("tasks", justify="right")
    table.add_column("share", justify="right")
    for name, number in sorted(counts.items()):
        table.add_row(Text(printable(name)), f"{number:,}", f"{number / total:.0%}")
    return table


def _table(first: str) -> Table:
    table = Table(border_style="cyan")
    table.add_column(first, style="bold cyan", no_wrap=True)
    return table
