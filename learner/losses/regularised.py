"""Losses that add a quadratic penalty on the log ratio to the policy gradient.

# B rows (answers) of one micro-batch, T actions of the longest
"""

import torch

from slipstream.learner.losses.base import LossInputs, LossTerms


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
