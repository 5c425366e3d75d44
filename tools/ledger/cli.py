"""`slipstream ledger`: reads the ledger of a run."""

from collections.abc import Sequence

from slipstream.tools.cli import dispatch

COMMANDS = {
    "verify": ("slipstream.tools.ledger.inspect:verify", "check the consistency of a run's ledger"),
    "show": ("slipstream.tools.ledger.inspect:show", "report on a run's groups, or show the history of one"),
    "export": ("slipstream.tools.ledger.export:command", "write a run's groups to a parquet file"),
    "filtration-report": (
        "slipstream.tools.ledger.filtration_report:command",
        "compare PF-PPO's strategies on exported groups",
    ),
}


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream ledger`; returns its exit code."""
    return dispatch("slipstream ledger", "Read the ledger of a running, finished or crashed run.", COMMANDS, argv)
