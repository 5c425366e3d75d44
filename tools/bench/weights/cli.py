"""`slipstream bench weights`: how fast versions travel, and what they cost learner and generation."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.configs.runtime.logging import configure_logging
from slipstream.tools.bench.figures import Figures, bench_file
from slipstream.tools.bench.weights.crew import crew
from slipstream.tools.cli import at_least, seconds

TRANSFERS, PUBLICATIONS, GENERATION = PARTS = ("transfers", "publications", "generation")


def command(argv: Sequence[str]) -> int:
    """Measures, prints a line for each figure and keeps them in a file; returns 0, also when goals are missed.

    Raises: SlipstreamError when something does not start or does not go on.
    """
    arguments = _parser().parse_args(argv)
    # Imported here: torch takes seconds, and --help should not.
    from slipstream.tools.bench.weights.generation import generation
    from slipstream.tools.bench.weights.publication import publications
    from slipstream.tools.bench.weights.transfer import transfers

    configure_logging("bench", level="warning", folder=None)
    rounds = arguments.rounds
    figures = Figures()
    details: dict[str, Any] = {}
    with crew() as at:
        if TRANSFERS in arguments.parts:
            found, details[TRANSFERS] = transfers(at, size_mb=arguments.size_mb, rounds=rounds)
            figures.show(found)
        if PUBLICATIONS in arguments.parts:
            found, details[PUBLICATIONS] = publications(
                at, size_mb=arguments.size_mb, servers=sorted(set(arguments.servers)), rounds=rounds
            )
            figures.show(found)
        if GENERATION in arguments.parts:
            found, details[GENERATION] = generation(
                at,
                policies=arguments.policies,
                rounds=rounds,
                seconds=arguments.seconds,
                keep_stale_kv=arguments.keep_stale_kv,
            )
            figures.show(found)
    figures.keep(bench_file(arguments.runs, "weights"), settings=vars(arguments), details=details)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream bench weights", description="Measure the weight channel on this machine, without a GPU."
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--size-mb", type=at_least(1), default=500, help="size of a version in bfloat16 (default: 500)")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="rounds of all measurements (default: 5)")
    parser.add_argument(
        "--servers", type=at_least(1), nargs="+", default=[1, 2, 4], help="numbers of servers (default: 1 2 4)"
    )
    parser.add_argument(
        "--policies", nargs="+", choices=["tiny", "small"], default=["tiny", "small"],
        help="policies that a real engine generates with (default: tiny small)",
    )  # fmt: skip
    parser.add_argument(
        "--keep-stale-kv", action="store_true", help="generate with weights.keep_stale_kv: nothing is computed anew"
    )
    parser.add_argument("--seconds", type=seconds, default=10.0, help="of each window of generation (default: 10)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    return parser
