"""`python -m benchmarks PART`, from the root of a checkout: measures a part of the pipeline.

A part starts and ends the processes that it needs, prints its figures with their goals, and saves them as JSON. Its
module has `add_options(parser)` and `measure(options, figures)`, which returns the raw measurements.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.figures import Figures
from slipstream.configs.arguments import exit_code
from slipstream.configs.runtime.logging import configure_logging
from slipstream.tools.cli import new_file

PARTS = {
    "buffer": "throughput, latency and memory of the buffer",
    "dashboard": "loading and scrolling of the dashboard's page, with 10,000 steps and 1,000 servers",
    "demo": "time and CPU time of the demo, in turns with TRL",
    "experts": "mismatch of engine and learner on a mixture of experts, with router replay and without",
    "fit": "a learner's step: speed, and peak memory beside that of `slipstream fit`",
    "inflight": "groups in flight: fixed numbers and auto, with a small KV cache",
    "fleet": "sharing of work among many rollout servers without engines",
    "head": "log-probs from hidden states, beside those from all logits",
    "learner": "a learner's step on a CPU, in turns with a plain loop and TRL",
    "length": "a learner's step by length of answers and number of ranks, a core for each",
    "pipeline": "speed of the whole system by bound of staleness, beside the limit or in turns with TRL",
    "staleness": "learning from data that is k steps old, with each objective or recipe",
    "streams": "the dashboard's server: its first answer over a long run, and CPU time by number of clients",
    "trainings": "SFT and DPO on ragged rows, in turns with TRL",
    "turns": "episodes of several turns beside single turns, and beside agents of the gateway",
    "weights": "speed and stall of weight updates",
}
RESULTS = Path(__file__).parent / "results"


def command(argv: Sequence[str] | None = None) -> int:
    """Measures a part, prints and saves its figures; returns 1 if some could not be measured.

    Raises: ConfigError for options that this machine can't follow, SlipstreamError when a process fails.
    """
    width = max(map(len, PARTS))
    parts = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure a part of the pipeline.",
        epilog="\n".join(f"  {part:<{width}}  {purpose}" for part, purpose in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts.add_argument("part", choices=PARTS, help="see below; `python -m benchmarks PART --help` has its options")
    parts.add_argument("arguments", nargs=argparse.REMAINDER)
    chosen = parts.parse_args(argv)
    part = import_module(f"benchmarks.{chosen.part}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {chosen.part}",
        description=PARTS[chosen.part],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--json", type=new_file, default=RESULTS / f"{chosen.part}.json", help="file for the figures")
    part.add_options(parser)
    options = parser.parse_args(chosen.arguments)
    figures = Figures()
    details = part.measure(options, figures)
    figures.save(
        options.json, settings={"part": chosen.part, "arguments": chosen.arguments, **vars(options)}, details=details
    )
    return 1 if figures.failed else 0


def main() -> int:
    """Entry point. Returns 2 for invalid options, with a line for each."""
    configure_logging("benchmarks", level="warning", folder=None)
    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())
