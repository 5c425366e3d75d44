"""`slipstream ledger account`: what has become of every generated token."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from slipstream.buffer.store.account import Account, Tokens, account
from slipstream.tools.cli import table_console
from slipstream.tools.ledger.open import RUN_HELP, OpenLedger, with_ledger
from slipstream.tools.transcript import printable

MOST_SERVERS = 20
"""Servers of which the table has rows of their own."""
STATES = ("trained", "ready", "leased", "in_flight", "evaluation")


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream ledger account`; returns 0, or 1 if a row does not close.

    Raises: ConfigError when there is no such run, SlipstreamError when its ledger can't be read.
    """
    parser = argparse.ArgumentParser(
        prog="slipstream ledger account",
        description="Show what has become of every generated token of a run, by env and server. Nothing is changed.",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--json", action="store_true", help="all rows as JSON")
    arguments = parser.parse_args(argv)

    async def work(opened: OpenLedger) -> int:
        found = await account(opened.ledger.scripts)
        if arguments.json:
            print(json.dumps(found.as_json(), indent=2))
        else:
            _show(found)
        for problem in found.problems():
            print(printable(problem), file=sys.stderr)
        return 1 if found.problems() else 0

    return with_ledger(arguments.run, work)


def _show(found: Account) -> None:
    """Prints the sum, then rows by env and server."""
    console = table_console(min_width=100)
    print(printable(_sentence(found.total)))
    console.print(_table(found))


def _sentence(total: Tokens) -> str:
    parts = [f"{getattr(total, state):,} {state.replace('_', ' ')}" for state in STATES]
    parts += [f"{tokens:,} {reason}" for reason, tokens in Counter(total.lost).most_common()]
    return f"{total.generated:,} generated = " + " + ".join(parts)


def _table(found: Account) -> Table:
    table = Table(border_style="cyan")
    table.add_column("env", style="bold cyan", no_wrap=True)
    table.add_column("server", overflow="fold")
    for name in ("generated", *STATES):
        table.add_column(name.replace("_", " "), justify="right")
    table.add_column("lost", overflow="fold")
    for row in found.rows[:MOST_SERVERS]:
        lost = ", ".join(f"{tokens:,} {reason}" for reason, tokens in Counter(row.lost).most_common())
        numbers = [f"{getattr(row, state):,}" for state in ("generated", *STATES)]
        table.add_row(Text(printable(row.env)), Text(printable(row.server)), *numbers, Text(printable(lost)))
    return table
