"""`slipstream ledger`: finds the command and hands the rest of the line to its module."""

import argparse
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "verify": ("slipstream.tools.ledger.verify", "verify", "check a run's ledger against itself"),
    "show": ("slipstream.tools.ledger.show", "show", "report on a run's groups, or tell the history of one"),
    "export": ("slipstream.tools.ledger.export", "export", "write a run's groups to a parquet file"),
    "filtration-report": (
        "slipstream.tools.filtration_report",
        "filtration_report",
        "compare PF-PPO's strategies on exported groups",
    ),
}
"""Each command's module and function, which takes the arguments and returns the exit code, and what it does."""


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream ledger`; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="slipstream ledger",
        description="Look into the ledger of a run that is going on, has ended or has crashed.",
        epilog="\n".join(f"  {name:<18} {purpose}" for name, (_, _, purpose) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, help="see below; `slipstream ledger COMMAND --help` tells more")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the command")
    parsed = parser.parse_args(argv)
    module, function, _ = COMMANDS[parsed.command]
    code: int = getattr(import_module(module), function)(parsed.arguments)
    return code
