"""`slipstream bench`: measurements; every part starts what it needs."""

from collections.abc import Sequence

from slipstream.tools.cli import dispatch

PARTS = {
    "buffer": ("slipstream.tools.bench.buffer", "the ledger's throughput, latency, memory and growth"),
    "staleness": ("slipstream.tools.bench.staleness.cli", "what staleness does to learning, and what corrects it"),
    "weights": ("slipstream.tools.bench.weights.cli", "how long new weights take to arrive and what they stall"),
}


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream bench`; returns its exit code."""
    return dispatch("slipstream bench", "Measure a part of the pipeline.", PARTS, argv, called="part")
