"""Losses that clip each action's ratio to the proximal policy.

# B rows (answers) of one micro-batch, T actions of the longest
"""

import torch
from torch import Tensor

from slipstream.learner.losses.base import LossInputs, LossTerms


def clipped_surrogate(
    ratio_BT: Tensor, advantages_BT: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-min(r·A, clip(r)·A) with clip(r) in [1 - clip_low, 1 + clip_high], and where the clip stopped the gradient."""
    loss_BT = -ratio_BT * advantages_BT
    clipped_loss_BT = -ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT
    return torch.maximum(loss_BT, clipped_loss_BT), clipped_loss_BT > loss_BT


def ppo(inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None) -> LossTerms:
    """-min(r·A, clip(r)·A) with r = π_θ/π_prox; where A < 0 at most dual_clip·|A|.

    With a behaviour weight π_prox/μ on top it is the decoupled objective.

    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 7; the bound of bad actions: Ye et al. 2019, arXiv 1912.09729;
    decoupled: Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298.
    """
    advantages_BT = inputs.advantages_BT
    loss_BT, stopped_BT = clipped_surrogate(inputs.ratio_BT, advantages_BT, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is not None:
        bound_BT = dual_clip * advantages_BT.abs()
        beyond_BT = loss_BT > bound_BT  # only where the action is bad: a good one's loss is negative
        loss_BT = torch.where(beyond_BT, bound_BT, loss_BT)
        stopped_BT = stopped_BT | beyond_BT
    return LossTerms(loss_BT, inputs.marks(stopped_BT))
