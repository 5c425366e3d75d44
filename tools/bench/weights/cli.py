"""`slipstream bench weights`: how fast versions travel, and what they cost learner and generation."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.configs.logs import configure_logging
from slipstream.tools.bench.figures import Figure, write_figures
from slipstream.tools.bench.weights.crew import crew

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
    figures: list[Figure] = []
    details: dict[str, Any] = {}

    def show(part: str, found: tuple[list[Figure], dict[str, Any]]) -> None:
        figures.extend(found[0])
        details[part] = found[1]
        for figure in found[0]:
            print(figure.line, flush=True)

    with crew() as at:
        if TRANSFERS in arguments.parts:
            show(TRANSFERS, transfers(at, size_mb=arguments.size_mb, rounds=rounds))
        if PUBLICATIONS in arguments.parts:
            servers = sorted(arguments.servers)
            show(PUBLICATIONS, publications(at, size_mb=arguments.size_mb, servers=servers, rounds=rounds))
        if GENERATION in arguments.parts:
            kept = arguments.keep_stale_kv
            found = generation(
                at, policies=arguments.policies, rounds=rounds, seconds=arguments.seconds, keep_stale_kv=kept
            )
            show(GENERATION, found)
    settings: dict[str, Any] = vars(arguments) | {"runs": str(arguments.runs)}
    file = write_figures(arguments.runs / "bench", "weights", figures, settings=settings, details=details)
    print(f"kept in {file}")
    sys.stdout.flush()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream bench weights", description="Measure the weight channel on this machine, without a GPU."
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--size-mb", type=int, default=500, help="size of a version in bfloat16 (default: 500)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all measurements (default: 5)")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4], help="numbers of servers (default: 1 2 4)")
    parser.add_argument(
        "--policies", nargs="+", choices=["tiny", "small"], default=["tiny", "small"],
        help="policies that a real engine generates with (default: tiny small)",
    )  # fmt: skip
    parser.add_argument(
        "--keep-stale-kv", action="store_true", help="generate with weights.keep_stale_kv: nothing is computed anew"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each window of generation (default: 10)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    return parser
