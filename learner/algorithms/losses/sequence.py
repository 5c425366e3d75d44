"""Losses whose trust region bounds a whole trajectory's ratio: of an episode of several, each has a ratio of its own.

# B rows (trajectories) of one micro-batch, T actions of the longest
"""

import torch

from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms, bounded_exp
from slipstream.learner.algorithms.losses.clipped import clipped_surrogate


def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossTerms:
    """PPO's clipped surrogate of s = exp(mean log(π_θ/π_prox)), one ratio for all actions of a trajectory.

    Action by action the ratio is sg[s]·π_θ/sg[π_θ], so that each action's gradient carries its own advantage; where a
    trajectory's actions share one, its mean token loss and gradient are those of the sequence-level objective.

    Source: Zheng et al. 2025, arXiv 2507.18071 (the token-level form, GSPO-token).
    """
    mean_log_ratio_B1 = inputs.log_ratio_BT.detach().sum(-1, keepdim=True) / inputs.lengths_B1
    own_BT = torch.exp(inputs.logprobs_BT - inputs.logprobs_BT.detach())
    loss_BT, stopped_BT = clipped_surrogate(
        bounded_exp(mean_log_ratio_B1) * own_BT, inputs.advantages_BT, clip_low=clip_low, clip_high=clip_high
    )
    return LossTerms(loss_BT, inputs.marks(stopped_BT))


def gmpo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossTerms:
    """-A·exp(mean of the clipped log ratios), with A the trajectory's mean advantage.

    A log ratio is clipped to at most clip_high where the action is good, to at least -clip_low where it is bad. Every
    action of a trajectory holds its loss, so that the mean over its actions is that loss, with its gradient:
    aggregate by seq-mean-token-mean. Behaviour weights of single actions then count by their mean.

    Source: Zhao et al. 2025, arXiv 2507.20673.
    """
    log_ratio_BT, good_BT = inputs.log_ratio_BT, inputs.advantages_BT > 0
    clipped_BT = torch.where(good_BT, log_ratio_BT.clamp(max=clip_high), log_ratio_BT.clamp(min=-clip_low))
    ratio_B1 = bounded_exp(clipped_BT.sum(-1, keepdim=True) / inputs.lengths_B1)
    advantage_B1 = (inputs.advantages_BT * inputs.mask_BT).sum(-1, keepdim=True) / inputs.lengths_B1
    loss_BT = (-advantage_B1 * ratio_B1).expand_as(inputs.mask_BT)
    return LossTerms(loss_BT, inputs.marks((clipped_BT != log_ratio_BT) & (inputs.advantages_BT != 0)))
