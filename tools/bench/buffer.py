"""`slipstream bench buffer`: what the buffer can do on this machine, each figure with its goal."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from slipstream.tools.bench.figures import Figures, bench_file
from slipstream.tools.bench.group_path import ANSWERS, TOKENS, latency, throughput, where_the_time_goes
from slipstream.tools.bench.growth import LEASED, LEASES, leases, shards
from slipstream.tools.bench.memory import memory
from slipstream.tools.bench.stage import stage, whole_steps
from slipstream.tools.cli import at_least, seconds


def command(argv: Sequence[str]) -> int:
    """Measures, prints a line for each figure and keeps them in a file; returns 0, also when goals are missed.

    Raises: SlipstreamError when something does not start or does not go on.
    """
    arguments = _parser().parse_args(argv)
    figures = Figures()
    path_groups = whole_steps(arguments.path_groups)
    with stage() as at:
        found, details = throughput(at, groups=path_groups, rounds=arguments.rounds)
        figures.show(found)
        figures.show(where_the_time_goes(at, groups=path_groups, cpu_us=details["cpu_us"]))
        figures.show(latency(at, groups_per_s=found[0].value, seconds=arguments.latency_s))
        figures.show(shards(at, groups=path_groups, answers=ANSWERS, tokens=TOKENS))
        figures.show(leases(at, ready=sorted(set(arguments.ready))))
        figures.show(memory(at, groups=arguments.groups))
    figures.keep(bench_file(arguments.runs, "buffer"), settings=vars(arguments), details=details)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slipstream bench buffer", description="Measure the buffer on this machine.")
    parser.add_argument(
        "--groups", type=at_least(1), default=20_000, help="groups for the memory's growth (default: 20000)"
    )
    parser.add_argument(
        "--path-groups", type=at_least(1), default=4096, help="groups in a round of the path (default: 4096)"
    )
    parser.add_argument("--rounds", type=at_least(1), default=5, help="rounds of path and bare commands (default: 5)")
    parser.add_argument("--latency-s", type=seconds, default=20.0, help="seconds at half load (default: 20)")
    parser.add_argument(
        "--ready", type=at_least(LEASES * LEASED), nargs="+", default=[1000, 10_000, 100_000],
        help="numbers of ready groups (default: 1000 10000 100000)",
    )  # fmt: skip
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    return parser
