"""`slipstream ledger verify`: is every group accounted for, in exactly one state?"""

import argparse
import sys
from collections.abc import Sequence

from slipstream.buffer.wire.messages import LedgerCounts
from slipstream.tools.ledger.opening import RUN_HELP, OpenLedger, with_ledger
from slipstream.tools.ledger.words import groups_by_state, printable


def command(argv: Sequence[str]) -> int:
    """Runs the command; returns 0 for a sound ledger, 1 for one that is not.

    Raises: ConfigError when there is no such run, SlipstreamError when its ledger can't be read.
    """
    parser = argparse.ArgumentParser(
        prog="slipstream ledger verify",
        description="Check a run's ledger against itself. Nothing is changed: of a run that isn't going on, a copy of "
        "its data is checked.",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    return with_ledger(parser.parse_args(argv).run, _verify)


async def _verify(opened: OpenLedger) -> int:
    problems = await opened.ledger.verify()
    steps = await opened.ledger.check_steps()
    problems += steps.problems
    for problem in problems:
        print(printable(problem))
    if problems:
        print(f"the ledger of run {opened.name} is damaged: {len(problems):,} problems", file=sys.stderr)
        return 1
    print(f"sound: {sum_of(await opened.ledger.counts())}")
    if steps.forgotten_step >= 0:
        print(
            f"not checked: how many groups each step up to {steps.forgotten_step} had; "
            "buffer.retention no longer remembers all of them"
        )
    return 0


def sum_of(counts: LedgerCounts) -> str:
    """The groups as a sum over their states."""
    states = {"in flight" if state == "issued" else state: n for state, n in groups_by_state(counts).items()}
    return f"{counts.issued:,} issued = " + " + ".join(f"{groups:,} {state}" for state, groups in states.items())
