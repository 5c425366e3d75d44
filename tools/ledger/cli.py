"""`slipstream ledger`: looks into the ledger of a run."""

from collections.abc import Sequence

from slipstream.tools.cli import dispatch

COMMANDS = {
    "verify": ("slipstream.tools.ledger.verify", "check a run's ledger against itself"),
    "show": ("slipstream.tools.ledger.show", "report on a run's groups, or tell the history of one"),
    "export": ("slipstream.tools.ledger.export", "write a run's groups to a parquet file"),
    "filtration-report": (
        "slipstream.tools.ledger.filtration_report",
        "compare PF-PPO's strategies on exported groups",
    ),
}


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream ledger`; returns its exit code."""
    description = "Look into the ledger of a run that is going on, has ended or has crashed."
    return dispatch("slipstream ledger", description, COMMANDS, argv)
