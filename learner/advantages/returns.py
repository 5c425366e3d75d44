"""Advantages from what is still to come after each action, without a group.

# B rows (answers), T actions
"""

import torch
from torch import Tensor

from slipstream.learner.advantages.base import AdvantageInputs, given
from slipstream.learner.advantages.whiten import whiten


def discounted_sum(values_BT: Tensor, discount: float | Tensor) -> Tensor:
    """Σ_{k ≥ 0} discount^k · values_{t+k} at each t, shape [B, T]; `discount` is one for all, or [B, 1]."""
    reach = 1
    # Doubles the span that is summed up: log2(T) steps in place of T.
    while reach < values_BT.shape[1]:
        beyond_BT = torch.nn.functional.pad(values_BT[:, reach:], (0, reach))
        values_BT = values_BT + discount**reach * beyond_BT
        reach *= 2
    return values_BT


def reward_to_go(inputs: AdvantageInputs, discount: float) -> Tensor:
    """What is still to come at each action, discounted per action, shape [B, T]; 0 outside the mask."""
    return discounted_sum(inputs.rewards_BT * inputs.mask_BT, discount) * inputs.mask_BT


def reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: float) -> Tensor:
    """Reward to go, whitened over the actions of all ranks, shape [B, T].

    Source: Hu et al. 2025 (REINFORCE++), arXiv 2501.03262.
    """
    return whiten(reward_to_go(inputs, gamma), inputs.mask_BT, inputs.total)


def remax(inputs: AdvantageInputs) -> Tensor:
    """Reward to go less the reward of the greedy answer to the same task, shape [B, T].

    Source: Li et al. 2023 (ReMax), arXiv 2310.10505.
    """
    greedy_B = given(inputs.greedy_rewards_B, "greedy_rewards_B")
    return reward_to_go(inputs, 1.0) - greedy_B[:, None] * inputs.mask_BT
