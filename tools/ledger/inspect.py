"""`slipstream ledger verify` and `show`: the consistency of a ledger, a report on its groups, the history of one."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from slipstream.buffer.policies.sampling import task_order
from slipstream.buffer.store.reader import STATES, GroupRecord
from slipstream.buffer.wire.codec import decode_group
from slipstream.buffer.wire.messages import Group, LedgerCounts, Trajectory
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.models.folder import Decode
from slipstream.tools.cli import printable, table_console
from slipstream.tools.ledger.open import RUN_HELP, OpenLedger, with_ledger
from slipstream.tools.transcript import decoder_or_reason, text_of

LATEST = 5
"""Number of ids shown for each state."""
MIN_COLUMNS = 80
TRAINED = "trained"


@dataclass(frozen=True)
class Report:
    """The state of a run's ledger."""

    run: str
    counts: LedgerCounts
    trained_answers: int
    """Each as often as it was used."""
    length_bias: Mapping[str, float]
    """Kolmogorov-Smirnov distance from the lengths of all delivered answers: of trained ones, and of dropped ones by
    reason. Only where lengths are known.
    """
    outcomes: Mapping[str, int]
    """Number of tasks by the outcome of their latest group."""
    latest: Mapping[str, Sequence[str]]
    """Ids by state, those issued last first."""


def verify(argv: Sequence[str]) -> int:
    """Runs `slipstream ledger verify`; returns 0 for a sound ledger, 1 for a damaged one.

    Raises: ConfigError when there is no such run, SlipstreamError when its ledger can't be read.
    """
    parser = argparse.ArgumentParser(
        prog="slipstream ledger verify",
        description="Check the consistency of a run's ledger. Nothing is changed: of a finished or crashed run, "
        "a copy of its data is checked.",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    return with_ledger(parser.parse_args(argv).run, _verify)


async def _verify(opened: OpenLedger) -> int:
    problems = await opened.ledger.verify()
    steps = await opened.ledger.check_steps()
    problems += steps.problems
    problems += [
        f"group {group_id} is stored in a spill file, but {error}"
        for group_id, error in (await opened.reader.unreadable()).items()
    ]
    for problem in problems:
        print(printable(problem))
    if problems:
        print(f"the ledger of run {opened.name} is damaged: {len(problems):,} problems", file=sys.stderr)
        return 1
    print(f"sound: {_sum(await opened.ledger.counts())}")
    if steps.forgotten_step >= 0:
        print(
            f"not checked: how many groups each step up to {steps.forgotten_step} had; "
            "the ledger no longer remembers all of them"
        )
    return 0


def _sum(counts: LedgerCounts) -> str:
    """The number of issued groups as a sum over their states."""
    states = {"in flight" if state == "issued" else state: n for state, n in _groups_by_state(counts).items()}
    return f"{counts.issued:,} issued = " + " + ".join(f"{groups:,} {state}" for state, groups in states.items())


def show(argv: Sequence[str]) -> int:
    """Runs `slipstream ledger show`; returns 0.

    Raises: ConfigError when there is no such run, SlipstreamError when its ledger can't be read or lacks the group.
    """
    parser = argparse.ArgumentParser(
        prog="slipstream ledger show",
        description="Report on the groups of a run; or show the whole history of one. Nothing is changed.",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    parser.add_argument("group", nargs="?", metavar="GROUP", help="a group's id; without it: the report")
    arguments = parser.parse_args(argv)
    group: str | None = arguments.group

    async def work(opened: OpenLedger) -> int:
        if group is None:
            await _print_report(opened)
        else:
            await _print_group(opened, group)
        return 0

    return with_ledger(arguments.run, work)


async def _print_report(opened: OpenLedger) -> None:
    standing = await opened.ledger.snapshot()
    report = Report(
        run=opened.name,
        counts=standing.counts,
        trained_answers=sum((await opened.ledger.lengths([]))[TRAINED].values()),
        length_bias=await opened.ledger.length_bias(sorted(standing.counts.answers_dropped)),
        outcomes=standing.tasks,
        latest={state: await opened.reader.latest(state, LATEST) for state in STATES},
    )
    console = table_console(min_width=MIN_COLUMNS)
    for table in _report_tables(report):
        console.print(table)


async def _print_group(opened: OpenLedger, group_id: str) -> None:
    record = await opened.reader.group(group_id)
    if record is None:
        if await opened.reader.was_issued(group_id):
            raise SlipstreamError(
                f"group {group_id} of run {opened.name} is forgotten: buffer.retention limits how many finished groups "
                "the ledger keeps"
            )
        raise SlipstreamError(
            f"run {opened.name} has no group {group_id!r}; `slipstream ledger show RUN` without an id lists the latest"
        )
    tasks = opened.identity.get("train_tasks")
    console = table_console(min_width=MIN_COLUMNS)
    for table in _group_tables(record, seed=opened.config.run.seed, train_tasks=None if tasks is None else int(tasks)):
        console.print(table)
    if record.blob is not None:
        decode, reason = decoder_or_reason(opened.folder, opened.config.model)
        print(f"texts not shown: {reason}" if decode is None else _texts(decode_group(record.blob), decode))


def _report_tables(report: Report) -> list[RenderableType]:
    """Groups by state, and where there are any, reasons, lengths and tasks."""
    tables: list[RenderableType] = [_titled(f"run {report.run}: {report.counts.issued:,} groups", _states(report))]
    if report.counts.reasons:
        tables.append(_titled("groups dropped", _reasons(report.counts.reasons)))
    if report.counts.uses or report.counts.answers_dropped:
        tables.append(_titled("length bias", _lengths(report)))
    if report.outcomes:
        skipped = report.counts.skipped_tasks
        note = f"; tasks skipped by the curriculum: {skipped:,}" if skipped else ""
        tables.append(_titled(f"tasks, by their latest group{note}", _outcomes(report.outcomes)))
    return tables


def _states(report: Report) -> Table:
    table = _table("state")
    table.add_column("groups", justify="right")
    table.add_column("latest ids")
    for state, number in _groups_by_state(report.counts).items():
        table.add_row(state, f"{number:,}", " ".join(report.latest[state]))
    return table


def _lengths(report: Report) -> Table:
    table = _table("answers")
    table.add_column("number", justify="right")
    table.add_column("KS distance of their lengths from all", justify="right")
    for name in (TRAINED, *sorted(report.counts.answers_dropped)):
        answers = report.trained_answers if name == TRAINED else report.counts.answers_dropped[name]
        distance = report.length_bias.get(name)
        label = TRAINED if name == TRAINED else f"dropped: {name}"
        table.add_row(
            Text(printable(label)),
            f"{answers:,}",
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


def _group_tables(record: GroupRecord, *, seed: int, train_tasks: int | None) -> list[RenderableType]:
    """All that the ledger holds on the group.

    Raises: FrameError when its bytes are no group.
    """
    state = record.state or "an evaluation; the ledger keeps its answers only"
    facts = _facts(record, seed=seed, train_tasks=train_tasks)
    tables: list[RenderableType] = [_titled(f"group {record.id}: {state}", facts)]
    if record.history:
        tables.append(_titled("history", _history(record)))
    if record.blob is not None:
        group = decode_group(record.blob)
        missing = f", {group.missing} were not finished in time" if group.missing else ""
        title = f"{len(group.trajectories)} answers to task {' '.join(map(str, group.indices))}{missing}"
        tables.append(_titled(title, _answers(group)))
    return tables


def _texts(group: Group, decode: Decode) -> str:
    """All answers of a group as text."""
    return "\n\n".join(
        f"answer {number}, reward {trajectory.reward:.4g}\n{text_of(trajectory, decode)}"
        for number, trajectory in enumerate(group.trajectories)
    )


def _facts(record: GroupRecord, *, seed: int, train_tasks: int | None) -> Table:
    table = Table(show_header=False, border_style="cyan")
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts(record, seed=seed, train_tasks=train_tasks).items():
        if value:
            table.add_row(name, Text(printable(value)))
    return table


def facts(record: GroupRecord, *, seed: int, train_tasks: int | None) -> dict[str, str]:
    """Facts by label; empty where unknown."""
    oldest, version, failures = record.number("oldest"), record.number("version"), record.number("failures")
    # From 64 on the ledger keeps the lower bound of a bucket (lengths.py).
    lengths = ", ".join(f"{n} of {tokens}{'+' if tokens >= 64 else ''}" for tokens, n in sorted(record.lengths.items()))
    steps = ", ".join(map(str, record.steps))
    return {
        "task": _task(record, seed=seed, train_tasks=train_tasks),
        "server": record.fields.get("server", ""),
        "policy version": ""
        if version is None
        else f"{version} when it was issued" + ("" if oldest is None else f", {oldest} the oldest of its tokens"),
        "answers": f"{lengths} tokens" if lengths else "",
        "trained in": f"step {steps}" if len(record.steps) == 1 else f"steps {steps}" if steps else "",
        "failed deliveries": f"{failures}" if failures else "",
        "exported": "yes" if "exported" in record.fields else "",
        "spill file": record.spill_error or record.location,
    }


def _task(record: GroupRecord, *, seed: int, train_tasks: int | None) -> str:
    epoch, position = record.number("epoch"), record.number("position")
    if epoch is None or position is None:
        return ""
    place = f"epoch {epoch}, position {position}"
    if train_tasks is None or not 0 <= position < train_tasks:
        return place
    return f"{place}: index {task_order(train_tasks, seed=seed, epoch=epoch)[position]}"


def _history(record: GroupRecord) -> Table:
    table = Table(border_style="cyan")
    table.add_column("time", no_wrap=True)
    table.add_column("since issue", justify="right", no_wrap=True)
    table.add_column("state", style="bold cyan", no_wrap=True)
    table.add_column("", overflow="fold")  # server names contain host names, which may be long
    start = record.history[0].at
    for event in record.history:
        table.add_row(_utc(event.at), f"{event.at - start:+.3f} s", event.state, Text(printable(event.detail)))
    return table


def _answers(group: Group) -> Table:
    table = Table(border_style="cyan")
    for name in ("reward", "tokens", "finished by", "versions of its tokens", "scores"):
        table.add_column(name, justify="right" if name in ("reward", "tokens") else "left")
    for trajectory in group.trajectories:
        table.add_row(
            f"{trajectory.reward:.4g}",
            f"{sum(span.end - span.start for span in trajectory.spans):,}",
            Text(printable(trajectory.finish_reason)),
            _spans(trajectory),
            Text(printable(", ".join(f"{name} {score:.4g}" for name, score in trajectory.scores.items()))),
        )
    return table


def _spans(trajectory: Trajectory) -> str:
    return ", ".join(f"{span.version}: {span.start} to {span.end - 1}" for span in trajectory.spans)


def _utc(at: float) -> str:
    """A time as `2026-01-31 23:59:59.123 UTC`."""
    return datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="milliseconds").replace("+00:00", " UTC")


def _groups_by_state(counts: LedgerCounts) -> dict[str, int]:
    """Number of groups in each state; each issued group is in exactly one."""
    return {
        "issued": counts.in_flight,
        "ready": counts.ready,
        "leased": counts.leased,
        "trained": counts.trained - counts.durable,
        "durable": counts.durable,
        "filtered": counts.filtered,
        "expired": counts.expired,
        "reissued": counts.reissued,
    }


def _titled(title: str, table: Table) -> Lines:
    """A table below a title that may be wider."""
    return Lines(Text(printable(title), style="bold"), table)
