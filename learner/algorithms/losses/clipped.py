"""Losses that clip each action's ratio to the proximal policy.

# B rows (answers) of one micro-batch, T actions of the longest
"""

import torch
from torch import Tensor

from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms, bounded_exp


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


def sapo(inputs: LossInputs, *, tau_positive: float, tau_negative: float) -> LossTerms:
    """-A·(4/τ)·sigmoid(τ·(r - 1)), with r = π_θ/π_prox and a steepness τ for good and another for other actions.

    At r = 1 it has PPO's gradient; far from 1 the gradient dies away.

    Source: arXiv 2511.20347.
    """
    tau_BT = torch.full_like(inputs.mask_BT, tau_negative).masked_fill(inputs.advantages_BT > 0, tau_positive)
    gate_BT = torch.sigmoid(tau_BT * (inputs.ratio_BT - 1)) * 4 / tau_BT
    return LossTerms(-gate_BT * inputs.advantages_BT, torch.zeros_like(inputs.mask_BT))


def dro(inputs: LossInputs, *, beta: float) -> LossTerms:
    """-A·log π_θ + β/2·log²(π_θ/π_prox), action by action.

    Source: Richemond et al. 2024, arXiv 2405.19107, with the advantage in place of reward less value.
    """
    loss_BT = -inputs.advantages_BT * inputs.logprobs_BT + beta / 2 * inputs.log_ratio_BT.square()
    return LossTerms(loss_BT, torch.zeros_like(inputs.mask_BT))


def kimi(inputs: LossInputs, *, tau: float) -> LossTerms:
    """-A·log π_θ(answer) + τ/2·log²(π_θ(answer)/π_prox(answer)).

    Every action of an answer holds its own part of the first term and an equal share of the second, so that the sum
    over its actions is the answer's loss, with its gradient: aggregate by seq-mean-token-sum.

    Source: Kimi k1.5, arXiv 2501.12599, section 2.3.
    """
    penalty_B1 = tau / 2 * inputs.log_ratio_BT.sum(-1, keepdim=True).square()
    loss_BT = -inputs.advantages_BT * inputs.logprobs_BT + penalty_B1 / inputs.lengths_B1
    return LossTerms(loss_BT, torch.zeros_like(inputs.mask_BT))


def reinforce(inputs: LossInputs) -> LossTerms:
    """-A·log π_θ.

    Source: Williams 1992, Simple statistical gradient-following algorithms for connectionist reinforcement learning.
    """
    return LossTerms(-inputs.advantages_BT * inputs.logprobs_BT, torch.zeros_like(inputs.mask_BT))


def cispo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossTerms:
    """-sg[clip(r)]·A·log π_θ, with r = π_θ/π_prox and clip(r) in [1 - clip_low, 1 + clip_high].

    Source: MiniMax-M1, arXiv 2506.13585.
    """
    ratio_BT = inputs.ratio_BT.detach()
    weight_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT = -weight_BT * inputs.advantages_BT * inputs.logprobs_BT
    return LossTerms(loss_BT, inputs.marks(weight_BT != ratio_BT))


def topr(inputs: LossInputs, *, cap: float) -> LossTerms:
    """-w·A·log π_θ, where w is 1 for good actions and min(π_θ(answer)/μ(answer), cap), detached, for bad ones.

    The ratio is that of the whole answer, a product over its actions. It corrects for the behaviour policy by itself: a
    behaviour weight on top would do so twice.

    Source: Le Roux et al. 2025, arXiv 2503.14286.
    """
    log_ratio_BT = (inputs.logprobs_BT.detach() - inputs.behaviour_logprobs_BT) * inputs.mask_BT
    ratio_B1 = bounded_exp(log_ratio_BT.sum(-1, keepdim=True))
    bad_BT = inputs.advantages_BT < 0
    weight_BT = torch.where(bad_BT, ratio_B1.clamp(max=cap), 1.0)
    loss_BT = -weight_BT * inputs.advantages_BT * inputs.logprobs_BT
    return LossTerms(loss_BT, inputs.marks(bad_BT & (ratio_B1 > cap)))
