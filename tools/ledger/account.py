"""`slipstream ledger account`: what has become of every generated token."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from slipstream.buffer.store.account import Account, Tokens, account
from slipstream.tools.cli import printable, table_console
from slipstream.tools.ledger.open import RUN_HELP, OpenLedger, with_ledger

MOST_ROWS = 20
"""Rows shown, those with the most tokens; the others are summed up."""
MIN_COLUMNS = 100
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
        problems = found.problems()
        if arguments.json:
            print(json.dumps(found.as_json(), indent=2))
        else:
            _show(found)
        for problem in problems:
            print(printable(problem), file=sys.stderr)
        return 1 if problems else 0

    return with_ledger(arguments.run, work)


def _show(found: Account) -> None:
    """Prints the sum, then the rows."""
    print(_sentence(found.total))
    table = Table(border_style="cyan")
    table.add_column("env", style="bold cyan", no_wrap=True)
    table.add_column("server", overflow="fold")
    for name in ("generated", "taken_over", *STATES, "lost"):
        table.add_column(name.replace("_", " "), justify="right")
    rows = sorted(found.rows, key=lambda row: -row.generated)
    shown, others = rows[:MOST_ROWS], rows[MOST_ROWS:]
    for row in sorted(shown, key=found.rows.index):
        table.add_row(Text(printable(row.env)), Text(printable(row.server)), *_numbers(row))
    if others:
        table.add_row(f"{len(others):,} other rows", "", *_numbers(Tokens.sum_of(others)))
    table_console(min_width=MIN_COLUMNS).print(table)


def _sentence(total: Tokens) -> str:
    """Generated tokens as a sum."""
    parts = [f"{getattr(total, state):,} {state.replace('_', ' ')}" for state in STATES]
    parts += [f"{tokens:,} {printable(reason)}" for reason, tokens in Counter(total.lost).most_common()]
    taken_over = f" + {total.taken_over:,} taken over" if total.taken_over else ""
    return f"{total.generated:,} generated{taken_over} = " + " + ".join(parts)


def _numbers(tokens: Tokens) -> list[str]:
    numbers = [tokens.generated, tokens.taken_over, *(getattr(tokens, state) for state in STATES)]
    numbers.append(sum(tokens.lost.values()))
    return [f"{number:,}" for number in numbers]
