"""Log-probs from hidden states, beside those from all logits: time and memory of both passes, on a CPU.

# A actions, D hidden size, V vocabulary
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import Figure, Figures, Goal, interleave
from benchmarks.step import peak_of
from slipstream.configs.runtime.processes import raise_malloc_thresholds
from slipstream.learner.models.fused_head import LogitRule, score_states
from slipstream.tools.cli import at_least

SLOWDOWN = Goal("<", 1.1)
LONG_ANSWER = (32_768, 151_936)
"""Actions and vocabulary."""
LONG_MEMORY = Goal("<", 400.0)
KEPT_BYTES = 1 << 29
"""Default of `learner.logits_bytes`."""

Head = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Log-probs [A] from hidden states [A, D], head [V, D] and actions [A]."""


def kept(states_AD: Tensor, weight_VD: Tensor, actions_A: Tensor) -> Tensor:
    """The learner's head, whose logits are kept for the backward pass."""
    return score_states(states_AD, weight_VD, None, actions_A, LogitRule(), kept_bytes=KEPT_BYTES).logprobs_A


def computed_again(states_AD: Tensor, weight_VD: Tensor, actions_A: Tensor) -> Tensor:
    """The learner's head, whose logits are computed a second time in the backward pass."""
    return score_states(states_AD, weight_VD, None, actions_A, LogitRule()).logprobs_A


def all_logits(states_AD: Tensor, weight_VD: Tensor, actions_A: Tensor) -> Tensor:
    """The usual head."""
    return (states_AD @ weight_VD.T).log_softmax(-1).gather(1, actions_A[:, None])[:, 0]


HEADS: dict[str, Head] = {"all logits": all_logits, "kept": kept, "computed again": computed_again}


def both_passes(head: Head, actions: int, vocabulary: int, hidden: int) -> tuple[float, float]:
    """Seconds of a forward and a backward pass, and their peak memory beside gradients."""
    states_AD = torch.randn(actions, hidden, requires_grad=True)
    weight_VD = (torch.randn(vocabulary, hidden) / hidden**0.5).requires_grad_()
    actions_A = torch.randint(vocabulary, (actions,))
    began = time.perf_counter()
    peak = peak_of(lambda: torch.autograd.backward(head(states_AD, weight_VD, actions_A).mean()))
    return time.perf_counter() - began, peak - 4 * (states_AD.numel() + weight_VD.numel())


def add_options(parser: argparse.ArgumentParser) -> None:
    """Sizes of the micro-batch."""
    add, positive = parser.add_argument, at_least(1)
    add("--actions", type=positive, default=2048, help="of a micro-batch")
    add("--vocabulary", type=positive, default=32_768, help="tokens")
    add("--hidden", type=positive, default=384, help="size of hidden states")
    add("--rounds", type=positive, default=5, help="measured passes of each kind, after a first one")
    add("--long", action="store_true", help="also one answer of 32,768 tokens over a vocabulary of 151,936")


def measure(options: argparse.Namespace, figures: Figures) -> dict[str, Any]:
    """Measures and shows all figures."""
    torch.set_num_threads(2)
    sizes = options.actions, options.vocabulary, options.hidden
    peaks = {name: both_passes(head, *sizes)[1] for name, head in HEADS.items()}
    if options.long:
        duration, peak = both_passes(computed_again, *LONG_ANSWER, options.hidden)
        figures.show(Figure("32,768 actions, 151,936 tokens", duration, "s"), _memory(peak, LONG_MEMORY))
    raise_malloc_thresholds()  # as the learner does; memory that was freed still counts from here on
    durations: dict[str, list[float]] = {name: [] for name in HEADS}
    for name in interleave(options.rounds + 1, list(HEADS)):
        durations[name].append(both_passes(HEADS[name], *sizes)[0])
    medians = {name: median(measured[1:]) for name, measured in durations.items()}
    for name, duration in medians.items():
        figures.show(Figure(name, duration, "s"), _memory(peaks[name]))
        if name != "all logits":
            goal = SLOWDOWN if name == "kept" else None
            figures.show(Figure("  time by that of all logits", duration / medians["all logits"], "", goal))
    return {"durations_s": durations, "peak_bytes": peaks}


def _memory(peak: float, goal: Goal | None = None) -> Figure:
    return Figure("  peak memory beside gradients", peak / 1e6, "MB", goal)
