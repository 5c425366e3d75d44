"""Micro-batches for tests of losses: by hand, and random ones.

# B rows (trajectories), T actions of the longest
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms


def trajectory(ratios: Sequence[float], advantages: Sequence[float], logprob: float = -1.0) -> LossInputs:
    """One trajectory whose actions have these π_θ/π_prox; μ is π_prox, and every log π_θ the same."""
    logprobs_BT = torch.full((1, len(ratios)), logprob, dtype=torch.float64)
    proximal_BT = logprobs_BT - torch.tensor([[math.log(ratio) for ratio in ratios]], dtype=torch.float64)
    return LossInputs(
        logprobs_BT=logprobs_BT.requires_grad_(), proximal_logprobs_BT=proximal_BT, behaviour_logprobs_BT=proximal_BT,
        advantages_BT=torch.tensor([list(advantages)], dtype=torch.float64), mask_BT=torch.ones_like(logprobs_BT),
    )  # fmt: skip


def gradient(loss: Tensor, inputs: LossInputs) -> Tensor:
    """Gradient of a scalar with respect to log π_θ, shape [B, T]."""
    (gradient_BT,) = torch.autograd.grad(loss, inputs.logprobs_BT)
    return gradient_BT


def one_action(
    loss: Callable[..., LossTerms], ratio: float, advantage: float, **arguments: Any
) -> tuple[float, float, float]:
    """Loss, its gradient and `clipped` of one action with log π_θ = -1."""
    inputs = trajectory([ratio], [advantage])
    terms = loss(inputs, **arguments)
    return terms.loss_BT.item(), gradient(terms.loss_BT.sum(), inputs).item(), terms.clipped_BT.item()


def random_inputs(seed: int = 3, *, rows: int = 8, actions: int = 7) -> LossInputs:
    """A micro-batch with gaps in its mask, a row without any action, and log-probs outside the mask."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, actions, generator=generator, dtype=torch.float64)

    proximal_BT = -0.1 - 3 * torch.rand(rows, actions, generator=generator, dtype=torch.float64)
    mask_BT = (torch.rand(rows, actions, generator=generator) < 0.7).double()
    mask_BT[rows // 2] = 0.0
    return LossInputs(
        logprobs_BT=(proximal_BT - 0.5 * normal().abs() * normal().sign()).clamp(max=-0.01).requires_grad_(),
        proximal_logprobs_BT=proximal_BT, behaviour_logprobs_BT=proximal_BT + 0.3 * normal(), advantages_BT=normal(),
        mask_BT=mask_BT,
    )  # fmt: skip


def mapped(inputs: LossInputs, change: Callable[[Tensor], Tensor]) -> LossInputs:
    """The micro-batch with all its tensors changed."""
    tensors: dict[str, Any] = {
        name: change(tensor) for name, tensor in vars(inputs).items() if isinstance(tensor, Tensor)
    }
    return replace(inputs, **tensors)


def of_rows(inputs: LossInputs, rows: Sequence[int], padding: int) -> LossInputs:
    """The micro-batch of these rows, padded on the right."""
    return mapped(inputs, lambda tensor: torch.nn.functional.pad(tensor[list(rows)], (0, padding)))
