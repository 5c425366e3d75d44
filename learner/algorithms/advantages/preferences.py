"""Advantages from preferences within a group: one answer is preferred to another where its reward is higher.

# B episodes, T actions
"""

import torch
from torch import Tensor

from slipstream.learner.algorithms.advantages.base import AdvantageInputs, required


def win_rate(inputs: AdvantageInputs) -> Tensor:
    """P̂(y ≻ π) - ½, shape [B, T], from -½ to ½.

    P̂ is the share of the group's K answers, itself included, that the answer beats; equal rewards count ½.

    Source: Wu et al. 2024 (SPPO), arXiv 2405.00675, section 4, with comparisons of rewards as the preference oracle.
    """
    beats_BB = _beats(inputs)
    margin_B = (beats_BB.sum(1) - beats_BB.sum(0)) / (2 * inputs.groups.size(inputs.mask_BT.dtype))
    return margin_B[:, None] * inputs.mask_BT


def online_dpo(inputs: AdvantageInputs, *, beta: float, pairs: str) -> Tensor:
    """The factors of ∇log π_θ in the gradient of the negative DPO loss, shape [B, T].

    The loss of a pair is -log sigmoid(beta·(h_w - h_l)), where w is preferred to l and h = log(π_θ/π_ref) of the
    whole answer. So w has beta·sigmoid(beta·(h_l - h_w)), l the negative of it, at the weights before the step's first
    update. A group's loss is the mean over its pairs. The factors are scaled to the mean over all groups that have a
    pair, for losses that are a mean over trajectories.

    Args:
        pairs: `best_worst`: the answers with the group's highest reward against those with its lowest; `all`: all
            with different rewards.

    Source: Rafailov et al. 2023 (DPO), arXiv 2305.18290, eq. 7; on fresh answers: Guo et al. 2024 (OAIF), arXiv
    2402.04792.
    """
    reference_BT = required(inputs.reference_logprobs_BT, "reference_logprobs_BT")
    ratios_BT = required(inputs.logprobs_BT, "logprobs_BT") - reference_BT
    h_B = (ratios_BT * inputs.mask_BT).sum(-1)
    groups, reward_B = inputs.groups, inputs.reward_B
    wins_BB = _beats(inputs)
    if pairs == "best_worst":
        best_B, worst_B = reward_B == groups.max(reward_B), -reward_B == groups.max(-reward_B)
        wins_BB = wins_BB & best_B[:, None] & worst_B[None, :]
    pairs_B = groups.sum(wins_BB.sum(1))
    weights_BB = wins_BB / pairs_B.clamp(min=1)[:, None]
    factors_BB = weights_BB * beta * torch.sigmoid(beta * (h_B[None, :] - h_B[:, None]))
    share_B = (pairs_B > 0) / groups.size(h_B.dtype)  # of its group
    counts = torch.stack([torch.ones_like(h_B), share_B]).sum(1)
    episodes, with_pairs = inputs.total(counts).unbind()
    advantage_B = episodes / with_pairs.clamp(min=1) * (factors_BB.sum(1) - factors_BB.sum(0))
    return advantage_B[:, None] * inputs.mask_BT


def _beats(inputs: AdvantageInputs) -> Tensor:
    """True where a row's answer is preferred to a column's, of one group; shape [B, B]."""
    reward_B, group_B = inputs.reward_B, inputs.groups.index_B
    return (group_B[:, None] == group_B[None, :]) & (reward_B[:, None] > reward_B[None, :])
