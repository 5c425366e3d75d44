"""`slipstream bench weights`: speed of transports, time until servers apply a version, stall of generation."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.configs.runtime.logging import configure_logging
from slipstream.tools.bench.figures import Figures, bench_parser
from slipstream.tools.bench.workers import Workers
from slipstream.tools.cli import at_least, seconds

PUBLISHED = ("shm", "gloo", "stream")
"""Transports of the publications."""
TRANSFERS, PUBLICATIONS, GENERATION = PARTS = ("transfers", "publications", "generation")


def command(argv: Sequence[str]) -> int:
    """Measures, prints and saves all figures; returns 0, also when goals are missed.

    Raises: SlipstreamError when a process fails.
    """
    arguments = _parser().parse_args(argv)
    # Imported here: torch takes seconds, and --help should not.
    import torch

    from slipstream.tools.bench.weights_transfer import transfers
    from slipstream.tools.bench.weights_updates import POLICIES, generation, publications, saved_model

    torch.set_num_threads(1)  # as in a learner that `slipstream up` starts: the other cores are the servers'
    configure_logging("bench", level="warning", folder=None)
    figures, details = Figures(), dict[str, Any]()
    size_bytes, rounds = arguments.size_mb * 1_000_000, arguments.rounds
    with Workers.start() as workers:
        if TRANSFERS in arguments.parts:
            measured, details[TRANSFERS] = transfers(workers, size_bytes=size_bytes, rounds=rounds)
            figures.show(measured)
        if PUBLICATIONS in arguments.parts:
            servers = sorted(set(arguments.servers))
            measured, details[PUBLICATIONS] = publications(
                workers, size_bytes=size_bytes, servers=servers, transports=arguments.transports, rounds=rounds
            )
            figures.show(measured)
        cases = {policy: POLICIES[policy] for policy in arguments.policies}
        if arguments.model is not None:
            cases = {name: saved_model(arguments.model, lora=name == "model-lora") for name in ("model", "model-lora")}
        if arguments.keep_stale_kv:
            cases = {
                name: replace(case, title=f"{case.title}, KV cache kept", keep_stale_kv=True)
                for name, case in cases.items()
            }
        for policy, case in cases.items() if GENERATION in arguments.parts else ():
            name = f"{GENERATION} {policy}"
            measured, details[name] = generation(workers, case, rounds=rounds, seconds=arguments.seconds)
            figures.show(measured)
    figures.save_bench("weights", arguments, details=details)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("weights", "Measure the weight channel on this machine, without a GPU.")
    add, positive = parser.add_argument, at_least(1)
    add("--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default: all)")
    add("--size-mb", type=positive, default=500, help="size of a version in bfloat16 (default: 500)")
    add("--rounds", type=positive, default=5, help="rounds of all measurements (default: 5)")
    add("--servers", type=positive, nargs="+", default=[1, 2, 4], help="numbers of servers (default: 1 2 4)")
    add(
        "--policies", nargs="+", choices=["tiny", "small", "tiny-lora", "small-lora"], default=["tiny", "small"],
        help="policies that a real engine generates with; -lora: only an adapter changes (default: tiny small)",
    )  # fmt: skip
    add(
        "--model", type=Path, metavar="FOLDER",
        help="generate with this saved model in place of --policies, all of it trained and then adapters",
    )  # fmt: skip
    add(
        "--transports", nargs="+", choices=PUBLISHED, default=PUBLISHED,
        help="transports of the publications (default: all)",
    )  # fmt: skip
    add("--keep-stale-kv", action="store_true", help="generate with weights.keep_stale_kv")
    add("--seconds", type=seconds, default=10.0, help="of each window of generation (default: 10)")
    return parser
