"""`slipstream bench head`: time and memory of log-probs from hidden states, beside those from all logits."""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from slipstream.configs.runtime.processes import raise_malloc_thresholds
from benchmarks.figures import Figure, Figures, Goal, bench_parser, interleave
from slipstream.tools.cli import at_least

if TYPE_CHECKING:
    from torch import Tensor

Step = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
"""Log-probs from hidden states, head and actions."""

SLOWDOWN = Goal("<", 1.1)
LONG_ANSWER = (32_768, 151_936)
"""Actions and vocabulary."""
LONG_MEMORY = Goal("<", 400.0)
KEPT_BYTES = 1 << 29
"""Default of `learner.logits_bytes`."""


def command(argv: Sequence[str]) -> int:
    """Measures, prints and saves all figures; returns 0."""
    arguments = _parser().parse_args(argv)
    # Imported here: torch takes seconds, and --help should not.
    import torch

    from slipstream.learner.models.fused_head import LogitRule, score_states
    from benchmarks.shape_step import peak_of

    torch.set_num_threads(arguments.threads)

    def kept(states_AD: "Tensor", weight_VD: "Tensor", actions_A: "Tensor") -> "Tensor":
        return score_states(states_AD, weight_VD, None, actions_A, LogitRule(), kept_bytes=KEPT_BYTES).logprobs_A

    def computed_again(states_AD: "Tensor", weight_VD: "Tensor", actions_A: "Tensor") -> "Tensor":
        return score_states(states_AD, weight_VD, None, actions_A, LogitRule()).logprobs_A

    def all_logits(states_AD: "Tensor", weight_VD: "Tensor", actions_A: "Tensor") -> "Tensor":
        logprobs_AV = (states_AD @ weight_VD.T).log_softmax(-1)
        return logprobs_AV.gather(1, actions_A[:, None])[:, 0]

    def run(step: Step, actions: int, vocabulary: int) -> tuple[float, float]:
        """Seconds of a forward and a backward pass, and their peak memory beside gradients."""
        states_AD = torch.randn(actions, arguments.hidden, requires_grad=True)
        weight_VD = (torch.randn(vocabulary, arguments.hidden) / arguments.hidden**0.5).requires_grad_()
        actions_A = torch.randint(vocabulary, (actions,))
        gradients = 4 * (states_AD.numel() + weight_VD.numel())

        def both_passes() -> None:
            torch.autograd.backward(step(states_AD, weight_VD, actions_A).mean())

        began = time.perf_counter()
        peak = peak_of(both_passes)
        return time.perf_counter() - began, peak - gradients

    def figure_pair(name: str, duration: float, memory: float, limit: Goal | None = None) -> list[Figure]:
        return [Figure(name, duration, "s"), Figure("  peak memory beside gradients", memory / 1e6, "MB", limit)]

    steps = {"all logits": all_logits, "kept": kept, "computed again": computed_again}
    sizes = arguments.actions, arguments.vocabulary
    peaks = {name: run(step, *sizes)[1] for name, step in steps.items()}
    figures = Figures()
    if arguments.long:
        figures.show(figure_pair("32,768 actions, 151,936 tokens", *run(computed_again, *LONG_ANSWER), LONG_MEMORY))
    raise_malloc_thresholds()  # as the learner does; memory that was freed still counts from here on
    durations: dict[str, list[float]] = {name: [] for name in steps}
    for name in interleave(arguments.rounds + 1, list(steps)):
        durations[name].append(run(steps[name], *sizes)[0])
    medians = {name: median(measured[1:]) for name, measured in durations.items()}
    for name, duration in medians.items():
        figures.show(figure_pair(name, duration, peaks[name]))
        if name != "all logits":
            goal = SLOWDOWN if name == "kept" else None
            figures.show([Figure("  time by that of all logits", duration / medians["all logits"], "", goal)])
    results = {"durations_s": durations, "peak_bytes": peaks}
    figures.save_bench("head", arguments, details=results)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("head", "Measure log-probs from hidden states beside those from all logits, on a CPU.")
    add, positive = parser.add_argument, at_least(1)
    add("--actions", type=positive, default=2048, help="of a micro-batch (default: 2048)")
    add("--vocabulary", type=positive, default=32_768, help="tokens (default: 32768)")
    add("--hidden", type=positive, default=384, help="size of hidden states (default: 384)")
    add("--threads", type=positive, default=2, help="of torch (default: 2)")
    add("--rounds", type=positive, default=5, help="measured passes of each kind, after a first one (default: 5)")
    add("--long", action="store_true", help="also one answer of 32,768 tokens over a vocabulary of 151,936")
    return parser
