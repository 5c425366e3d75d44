"""`slipstream ledger show`: what became of a run's groups, or of one of them."""

import argparse
from collections.abc import Sequence

from slipstream.buffer.store.reader import STATES
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.tools.arguments import table_console
from slipstream.tools.ledger.group_view import group_tables
from slipstream.tools.ledger.opening import RUN_HELP, RUNS, OpenLedger, with_ledger
from slipstream.tools.ledger.report import Report, report_tables

LATEST = 5
NARROWEST = 80
"""Columns that times, states and figures need."""


def command(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    Raises: ConfigError when there is no such run, SlipstreamError when its ledger can't be read or lacks the group.
    """
    parser = argparse.ArgumentParser(
        prog="slipstream ledger show",
        description="Report on the groups of a run; or tell the whole history of one. Nothing is changed.",
    )
    parser.add_argument("group", nargs="?", metavar="GROUP", help="a group's id; without it: the report")
    parser.add_argument("--run", metavar="RUN", help=RUN_HELP)
    arguments = parser.parse_args(argv)
    group: str | None = arguments.group
    if group is not None and arguments.run is None and ("/" in group or (RUNS / group).is_dir()):
        parser.error(f"{group!r} is no group's id; a run is named with --run {group}")

    async def work(opened: OpenLedger) -> int:
        if group is None:
            await _report(opened)
        else:
            await _group(opened, group)
        return 0

    return with_ledger(arguments.run, work)


async def _report(opened: OpenLedger) -> None:
    standing = await opened.ledger.standing()
    report = Report(
        run=opened.name,
        counts=standing.counts,
        length_bias=await opened.ledger.length_bias(sorted(standing.counts.answers_dropped)),
        outcomes=standing.tasks,
        latest={state: await opened.reader.latest(state, LATEST) for state in STATES},
    )
    console = table_console(narrowest=NARROWEST)
    for table in report_tables(report):
        console.print(table)


async def _group(opened: OpenLedger, group_id: str) -> None:
    record = await opened.reader.group(group_id)
    if record is None:
        if await opened.reader.was_issued(group_id):
            raise SlipstreamError(
                f"group {group_id} of run {opened.name} is forgotten: buffer.retention says how many groups that are "
                "over the ledger remembers"
            )
        raise SlipstreamError(
            f"run {opened.name} has no group {group_id!r}; `slipstream ledger show` without an id lists the latest"
        )
    tasks = opened.identity.get("train_tasks")
    console = table_console(narrowest=NARROWEST)
    for table in group_tables(record, seed=opened.config.run.seed, train_tasks=None if tasks is None else int(tasks)):
        console.print(table)
