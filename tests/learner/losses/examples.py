"""What the tests of losses share: one action, random micro-batches, splits.

# B rows (answers), T actions of the longest
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from pydantic import TypeAdapter
from torch import Tensor

from slipstream.configs.schema.algorithms import LossConfig
from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms

_SECTION: Final[TypeAdapter[LossConfig]] = TypeAdapter(LossConfig)


def section(name: str, **settings: Any) -> LossConfig:
    """The configuration of a loss."""
    return _SECTION.validate_python({"name": name, **settings})


def answer(ratios: Sequence[float], advantages: Sequence[float], logprob: float = -1.0) -> LossInputs:
    """One answer whose actions have these π_θ/π_prox; μ is π_prox, and every log π_θ the same."""
    logprobs_BT = torch.full((1, len(ratios)), logprob, dtype=torch.float64)
    proximal_BT = logprobs_BT - torch.tensor([[math.log(ratio) for ratio in ratios]], dtype=torch.float64)
    return LossInputs(
        logprobs_BT=logprobs_BT.requires_grad_(),
        proximal_logprobs_BT=proximal_BT,
        behaviour_logprobs_BT=proximal_BT,
        advantages_BT=torch.tensor([list(advantages)], dtype=torch.float64),
        mask_BT=torch.ones_like(logprobs_BT),
    )


def gradient(loss: Tensor, inputs: LossInputs) -> Tensor:
    """Of a scalar with respect to log π_θ, shape [B, T]."""
    (gradient_BT,) = torch.autograd.grad(loss, inputs.logprobs_BT)
    return gradient_BT


def one_action(
    loss: Callable[..., LossTerms], ratio: float, advantage: float, **arguments: Any
) -> tuple[float, float, float]:
    """Loss, its gradient and `clipped` of one action with log π_θ = -1."""
    inputs = answer([ratio], [advantage])
    terms = loss(inputs, **arguments)
    return terms.loss_BT.item(), gradient(terms.loss_BT.sum(), inputs).item(), terms.clipped_BT.item()


def random_inputs(seed: int = 3, *, rows: int = 8, actions: int = 7) -> LossInputs:
    """A micro-batch with holes in its mask, a row without any action, and log-probs outside the mask."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, actions, generator=generator, dtype=torch.float64)

    proximal_BT = -0.1 - 3 * torch.rand(rows, actions, generator=generator, dtype=torch.float64)
    mask_BT = (torch.rand(rows, actions, generator=generator) < 0.7).double()
    mask_BT[rows // 2] = 0.0
    return LossInputs(
        logprobs_BT=(proximal_BT - 0.5 * normal().abs() * normal().sign()).clamp(max=-0.01).requires_grad_(),
        proximal_logprobs_BT=proximal_BT,
        behaviour_logprobs_BT=proximal_BT + 0.3 * normal(),
        advantages_BT=normal(),
        mask_BT=mask_BT,
    )


def of_rows(inputs: LossInputs, rows: Sequence[int], padding: int) -> LossInputs:
    """The micro-batch of these rows, with other actions' room to their right."""
    tensors: dict[str, Any] = {
        name: torch.nn.functional.pad(tensor[list(rows)], (0, padding))
        for name, tensor in vars(inputs).items()
        if isinstance(tensor, Tensor)
    }
    return replace(inputs, **tensors)
