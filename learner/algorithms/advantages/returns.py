"""Advantages from returns: sums of rewards from each action to the end of its episode.

# B episodes, T actions
"""

import torch
from torch import Tensor

from slipstream.learner.algorithms.advantages.base import AdvantageInputs, required
from slipstream.learner.algorithms.advantages.groups import whiten


def discounted_sum(values_BT: Tensor, discount: float | Tensor) -> Tensor:
    """Σ_{k ≥ 0} discount^k · values_{t+k} at each t, shape [B, T].

    Args:
        discount: one number, or one for each row, shape [B, 1].
    """
    span = 1
    # Doubles the summed span: log2(T) steps in place of T.
    while span < values_BT.shape[1]:
        next_span_BT = torch.nn.functional.pad(values_BT[:, span:], (0, span))
        values_BT = values_BT + discount**span * next_span_BT
        span *= 2
    return values_BT


def reward_to_go(inputs: AdvantageInputs, discount: float) -> Tensor:
    """Sum of rewards from each action on, discounted per action, shape [B, T]; 0 outside the mask."""
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
    greedy_B = required(inputs.greedy_rewards_B, "greedy_rewards_B")
    return reward_to_go(inputs, 1.0) - greedy_B[:, None] * inputs.mask_BT


def gae(inputs: AdvantageInputs, *, gamma: float, lam: float, length_adaptive: float | None) -> Tensor:
    """Generalised advantage estimates Σ_k (gamma·λ)^k δ_{t+k}, whitened over the actions of all ranks, shape [B, T].

    The temporal difference δ_t is r_t + gamma · V_{t+1} - V_t.

    Args:
        gamma: discount per action.
        lam: λ.
        length_adaptive: a of λ = max(0, 1 - 1 / (a · actions of the episode)), in place of `lam`; None: `lam`.

    Source: Schulman et al. 2015, arXiv 1506.02438, eq. 16; length-adaptive λ: Yue et al. 2025 (VAPO), arXiv 2504.05118.
    """
    lam_B1: float | Tensor = lam
    if length_adaptive is not None:
        lam_B1 = (1 - 1 / (length_adaptive * inputs.mask_BT.sum(-1, keepdim=True))).clamp(min=0)
    return whiten(_raw_gae(inputs, gamma, lam_B1), inputs.mask_BT, inputs.total)


@torch.no_grad()
def value_returns(inputs: AdvantageInputs, *, gamma: float, lam: float) -> Tensor:
    """Targets of the critic: advantages at its own λ, not whitened, plus its values, shape [B, T].

    0 outside the mask, without gradient. λ = 1 gives the reward to go, for any values.

    Source: Yue et al. 2025 (VAPO, decoupled GAE), arXiv 2504.05118.
    """
    return _raw_gae(inputs, gamma, lam) + required(inputs.values_BT, "values_BT") * inputs.mask_BT


def _raw_gae(inputs: AdvantageInputs, gamma: float, lam: float | Tensor) -> Tensor:
    values_BT = required(inputs.values_BT, "values_BT") * inputs.mask_BT
    next_values_BT = torch.nn.functional.pad(values_BT[:, 1:], (0, 1))
    difference_BT = inputs.rewards_BT * inputs.mask_BT + gamma * next_values_BT - values_BT
    return discounted_sum(difference_BT, gamma * lam) * inputs.mask_BT


def optimal_token_baseline(inputs: AdvantageInputs, *, epsilon: float = 1e-8) -> Tensor:
    """Reward to go less B_t = Σ_i G_{i,t} W_{i,t} / (Σ_i W_{i,t} + epsilon), shape [B, T].

    The sums run over the episodes i of the group that have a t-th action, G is the reward to go and W_{i,t} the sum of
    1 - 2 π(action) + Σ_v π(v)² over the episode's actions up to t: the squared norm of the gradient of log π with
    respect to the logits, a proxy of that with respect to the weights. Where only one episode of a group still has
    actions, its advantages are nearly 0.

    Source: Li et al. 2026 (The Optimal Token Baseline), arXiv 2602.07078; verl 0.9.1, `optimal_token_baseline`, without
    its special cases for a group's longest answer and for groups of one.
    """
    logprobs_BT = required(inputs.logprobs_BT, "logprobs_BT")
    collision_BT = required(inputs.collision_BT, "collision_BT")
    # 0 for a certain action; rounding may make it negative.
    norm_BT = (1 - 2 * logprobs_BT.exp() + collision_BT).clamp(min=0) * inputs.mask_BT
    weight_BT = norm_BT.cumsum(-1) * inputs.mask_BT
    to_go_BT = reward_to_go(inputs, 1.0)
    baseline_BT = inputs.groups.sum(weight_BT * to_go_BT) / (inputs.groups.sum(weight_BT) + epsilon)
    return (to_go_BT - baseline_BT) * inputs.mask_BT
