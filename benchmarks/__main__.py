"""`slipstream bench`: measurements; each part starts the processes that it needs."""

import sys
from collections.abc import Callable, Sequence

from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.tools.cli import dispatch

PARTS = {
    "buffer": ("benchmarks.buffer:command", "throughput, latency and memory of the buffer"),
    "demo": ("benchmarks.demo:command", "time and CPU time of the demo, in turns with TRL"),
    "experts": ("benchmarks.experts:command", "mismatch of engine and learner with router replay"),
    "fleet": ("benchmarks.fleet:command", "sharing of work among many rollout servers"),
    "fit": ("benchmarks.fit:command", "measured peaks of memory beside those of `slipstream fit`"),
    "head": ("benchmarks.head:command", "log-probs from hidden states, beside those from all logits"),
    "learner": ("benchmarks.learner:command", "a learner's step, in turns with a plain loop and TRL"),
    "length": ("benchmarks.length:command", "a learner's step by length of answers and number of ranks"),
    "pipeline": ("benchmarks.pipeline:command", "what asynchrony gains, beside the limit"),
    "staleness": ("benchmarks.staleness:command", "effect of staleness on learning, for each objective"),
    "weights": ("benchmarks.weights:command", "speed and stall of weight updates"),
}


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream bench`; returns its exit code."""
    return dispatch("slipstream bench", "Measure a part of the pipeline.", PARTS, argv, metavar="part")


def run_script(measure: Callable[[Sequence[str]], None]) -> None:
    """Runs a bench that is a script of its own, with the arguments of this process; exits 1 when it fails."""
    try:
        measure(sys.argv[1:])
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
