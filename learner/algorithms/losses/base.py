"""What a policy loss is computed from, and what it leaves.

# B rows (answers) of one micro-batch, T actions of the longest
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.learner.algorithms.correction.mismatch import bounded


def bounded_exp(logs: Tensor) -> Tensor:
    """exp that neither overflows nor, multiplied by a gradient, leaves NaN."""
    return bounded(logs).exp()


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch; whole answers. Everything is finite, also outside the mask, where it is not used."""

    logprobs_BT: Tensor
    """log π_θ, with gradient."""
    proximal_logprobs_BT: Tensor
    """log π_prox, the anchor of the trust region."""
    behaviour_logprobs_BT: Tensor
    """log μ, as the engine recorded it."""
    advantages_BT: Tensor
    mask_BT: Tensor
    """1.0 where there is an action that counts; a row may have none."""
    generator: torch.Generator | None = None
    """For losses that choose at random; of the CPU."""

    @property
    def log_ratio_BT(self) -> Tensor:
        """log(π_θ/π_prox), 0 outside the mask."""
        return (self.logprobs_BT - self.proximal_logprobs_BT) * self.mask_BT

    @property
    def ratio_BT(self) -> Tensor:
        """π_θ/π_prox, 1 outside the mask."""
        return bounded_exp(self.log_ratio_BT)

    @property
    def lengths_B1(self) -> Tensor:
        """Actions of each row; 1 where there is none, so that one may divide by it."""
        return self.mask_BT.sum(-1, keepdim=True).clamp(min=1)

    def marks(self, condition_BT: Tensor) -> Tensor:
        """1.0 where the condition holds within the mask, shape [B, T]."""
        return condition_BT * self.mask_BT


@dataclass(frozen=True)
class LossTerms:
    """Per action; the behaviour weight and the aggregation come afterwards, outside."""

    loss_BT: Tensor
    """With gradient; what it holds outside the mask is not used."""
    clipped_BT: Tensor
    """1.0 where the trust region stopped or bounded the gradient; detached."""


PolicyLoss = Callable[..., LossTerms]
"""`(inputs: LossInputs, **arguments) -> LossTerms`."""
