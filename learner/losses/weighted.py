"""Losses that weigh the policy gradient; no action loses it.

# B rows (answers) of one micro-batch, T actions of the longest
"""

import torch

from slipstream.learner.losses.base import LossInputs, LossTerms, bounded_exp


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
