"""`slipstream bench`: measurements; each part starts the processes that it needs."""

from collections.abc import Sequence

from slipstream.tools.cli import dispatch

PARTS = {
    "buffer": ("slipstream.tools.bench.buffer:command", "the ledger's throughput, latency, memory and growth"),
    "staleness": (
        "slipstream.tools.bench.staleness.cli:command",
        "the effect of staleness on learning",
    ),
    "weights": (
        "slipstream.tools.bench.weights.cli:command",
        "speed and stall of weight updates",
    ),
}


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream bench`; returns its exit code."""
    return dispatch("slipstream bench", "Measure a part of the pipeline.", PARTS, argv, metavar="part")
