"""`slipstream bench`: measurements; every part starts what it needs."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

PARTS = {
    "buffer": ("slipstream.tools.bench.buffer", "the ledger's throughput, latency, memory and growth"),
    "staleness": ("slipstream.tools.bench.staleness.cli", "what staleness does to learning, and what corrects it"),
    "weights": ("slipstream.tools.bench.weights.cli", "how long new weights take to arrive and what they stall"),
}
"""Each part's module, which has `command(argv) -> exit code`, and what it measures."""


def command(argv: Sequence[str]) -> int:
    """Runs the part that the first argument names; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="slipstream bench",
        description="Measure a part of the pipeline.",
        epilog="\n".join(f"  {name:<9} {purpose}" for name, (_, purpose) in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=PARTS, help="see below; `slipstream bench PART --help` tells more")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the part")
    parsed = parser.parse_args(argv)
    module, _ = PARTS[parsed.part]
    code: int = import_module(module).command(parsed.arguments)
    sys.stdout.flush()
    return code
