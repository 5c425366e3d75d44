"""Inputs and outputs of policy losses.

# B rows (trajectories) of one micro-batch, T actions of the longest
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

LOG_BOUND: Final = 20.0
"""Bound of log ratios, beyond which a ratio is constant and has no gradient: exp(20) is 5e8, and exp(90) overflows."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Log ratios whose exp and its square are finite."""
    return log_ratio.clamp(-LOG_BOUND, LOG_BOUND)


def bounded_exp(logs: Tensor) -> Tensor:
    """exp of bounded logs: neither it nor its gradient overflows."""
    return bounded(logs).exp()


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch of whole trajectories. Values outside the mask are finite, but must not be used."""

    logprobs_BT: Tensor
    """log π_θ, with gradient."""
    proximal_logprobs_BT: Tensor
    """log π_prox, the anchor of the trust region."""
    behaviour_logprobs_BT: Tensor
    """log μ, as the engine recorded it."""
    advantages_BT: Tensor
    mask_BT: Tensor
    """1.0 where there is an action of the loss; a row may have none."""
    generator: torch.Generator | None = None
    """Random generator of losses with a random selection; on the CPU."""

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
        """Actions of each row, at least 1, for use as a divisor."""
        return self.mask_BT.sum(-1, keepdim=True).clamp(min=1)

    def marks(self, condition_BT: Tensor) -> Tensor:
        """1.0 where the condition holds within the mask, shape [B, T]."""
        return condition_BT * self.mask_BT


@dataclass(frozen=True)
class LossTerms:
    """Terms per action; importance weights and aggregation are applied outside."""

    loss_BT: Tensor
    """With gradient; values outside the mask are not used."""
    clipped_BT: Tensor
    """1.0 where the trust region stopped or bounded the gradient; detached."""


PolicyLoss = Callable[..., LossTerms]
"""`(inputs: LossInputs, **arguments) -> LossTerms`."""
