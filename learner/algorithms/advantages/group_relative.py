"""Advantages of episodes relative to their group; all actions of an episode, or of its turn, share their advantage.

# B episodes, T actions, K reward terms, U = T turns, of which an episode has fewer, N turns of all episodes
"""

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from slipstream.learner.algorithms.advantages.base import AdvantageInputs, required, rewards_at_the_end
from slipstream.learner.algorithms.advantages.groups import Groups, whiten
from slipstream.learner.algorithms.advantages.returns import discounted_sum

EPSILON: Final = 1e-6
"""Added to standard deviations."""


def penalise_length(inputs: AdvantageInputs, coefficient: float) -> AdvantageInputs:
    """The inputs with each reward less coefficient · pass rate · actions / actions of the group's longest episode.

    The pass rate is the group's mean reward, at least 0: what is mostly solved is to be solved shortly, and answers to
    what is never solved may be long.

    Source: prime-rl, `length_penalty` of its GRPO, the term in output tokens.
    """
    groups, lengths_B = inputs.groups, inputs.mask_BT.sum(-1)
    pass_rate_B = (groups.sum(inputs.reward_B) / groups.size(lengths_B.dtype)).clamp(min=0)
    penalty_B = coefficient * pass_rate_B * lengths_B / groups.max(lengths_B)
    return replace(inputs, rewards_BT=inputs.rewards_BT - rewards_at_the_end(penalty_B, inputs.mask_BT))


def grpo(inputs: AdvantageInputs, *, epsilon: float = EPSILON) -> Tensor:
    """(reward - mean) / (std + epsilon) of the group, shape [B, T]; the sample's std (n - 1).

    Source: Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, section 4.1.2.
    """
    return _standardised(inputs.reward_B, inputs.groups, epsilon)[:, None] * inputs.mask_BT


def dr_grpo(inputs: AdvantageInputs) -> Tensor:
    """reward - mean of the group, shape [B, T]. Source: Liu et al. 2025, arXiv 2503.20783."""
    return inputs.groups.deviations(inputs.reward_B)[:, None] * inputs.mask_BT


def grpo_passk(inputs: AdvantageInputs, *, divide_by_std: bool, epsilon: float = EPSILON) -> Tensor:
    """Best reward less second best for the best episode, 0 for all others, shape [B, T]; optionally over std + epsilon.

    All are 0 where two episodes have the best reward, and in a group of one.

    Source: Tang et al. 2025, arXiv 2503.19595.
    """
    reward_B, groups = inputs.reward_B, inputs.groups
    best_B = groups.max(reward_B)
    first_B = reward_B == best_B
    second_B = groups.max(reward_B.masked_fill(first_B, -torch.inf))
    is_best_B = first_B & (groups.sum(first_B.long()) == 1) & (groups.size(torch.long) > 1)
    margin_B = (best_B - second_B).masked_fill(~is_best_B, 0)
    if divide_by_std:
        margin_B = margin_B / (groups.std(reward_B) + epsilon)
    return margin_B[:, None] * inputs.mask_BT


def gdpo(inputs: AdvantageInputs, *, epsilon: float = EPSILON) -> Tensor:
    """Weighted sum of the reward terms, each standardised within its group like `grpo`, shape [B, T].

    The sum is whitened over the episodes of all ranks. A KL penalty on the reward is in none of the terms.

    Source: Liu et al. 2026 (GDPO), arXiv 2601.05242.
    """
    terms = required(inputs.terms, "terms")
    standard_KB = torch.stack([_standardised(term_B, inputs.groups, epsilon) for term_B in terms.values_KB])
    summed_B = (terms.weights_K[:, None] * standard_KB).sum(0)
    return whiten(summed_B, torch.ones_like(summed_B), inputs.total)[:, None] * inputs.mask_BT


def max_rl(inputs: AdvantageInputs) -> Tensor:
    """(reward - mean) / mean of the group, shape [B, T]; 0 where the mean is not positive.

    For rewards of 0 and 1 the gradient is an unbiased estimate of that of a likelihood truncated at the group's size,
    which weighs a task by about 1 / its pass rate.

    Source: Tajwar et al. 2026 (MaxRL), arXiv 2602.02710.
    """
    reward_B, groups = inputs.reward_B, inputs.groups
    mean_B = groups.sum(reward_B) / groups.size(reward_B.dtype)
    advantage_B = torch.where(mean_B > 0, groups.deviations(reward_B) / mean_B, 0.0)
    return advantage_B[:, None] * inputs.mask_BT


def rloo(inputs: AdvantageInputs) -> Tensor:
    """reward - mean of the group's other episodes, shape [B, T]; 0 in a group of one.

    Source: Ahmadian et al. 2024, arXiv 2402.14740.
    """
    size_B = inputs.groups.size(inputs.mask_BT.dtype)
    # The deviation from the mean of the others is n / (n - 1) times that from the mean of all.
    left_out_B = inputs.groups.deviations(inputs.reward_B) * size_B / (size_B - 1).clamp(min=1)
    return left_out_B[:, None] * inputs.mask_BT


def prime(inputs: AdvantageInputs, *, gamma: float, process_weight: float) -> Tensor:
    """Leave-one-out advantages of outcome and process rewards, added up, shape [B, T]; 0 in a group of one.

    r_o - mean_j r_o^j + process_weight · Σ_{k ≥ 0} gamma^k · (r_{t+k} - mean_j r̄^j), where j are the group's other
    episodes, r_o is the reward of an episode, r_t the implicit process reward of an action, and r̄ its mean over the
    episode's actions.

    Source: Cui et al. 2025 (PRIME), arXiv 2502.01456, section 3; the authors' code whitens the sum.
    """
    mask_BT, groups = inputs.mask_BT, inputs.groups
    process_BT = required(inputs.process_rewards_BT, "process_rewards_BT") * mask_BT
    size_B = groups.size(mask_BT.dtype)
    mean_B = process_BT.sum(-1) / mask_BT.sum(-1).clamp(min=1)
    others_B = (groups.sum(mean_B) - mean_B) / (size_B - 1).clamp(min=1)
    centred_BT = (process_BT - others_B[:, None]) * mask_BT * (size_B > 1)[:, None]
    return rloo(inputs) + process_weight * discounted_sum(centred_BT, gamma) * mask_BT


def opo(inputs: AdvantageInputs) -> Tensor:
    """reward - mean of the group weighted by the episodes' numbers of actions, shape [B, T].

    Source: Hao et al. 2025 (OPO), arXiv 2505.23585.
    """
    return inputs.groups.deviations(inputs.reward_B, inputs.mask_BT.sum(-1))[:, None] * inputs.mask_BT


def gpg(inputs: AdvantageInputs, *, scale_up_for: str) -> Tensor:
    """B / (B - M) · (reward - mean of the group), shape [B, T], where B counts the episodes on all ranks.

    Args:
        scale_up_for: M counts the episodes of groups without any spread (`no_advantage`, as in the paper), or those
            whose reward is 0 (`no_reward`, as in verl 0.9.1).

    Source: Chu et al. 2025 (GPG), arXiv 2504.02546.
    """
    advantage_B = inputs.groups.deviations(inputs.reward_B)
    informative_B = (inputs.reward_B if scale_up_for == "no_reward" else inputs.groups.std(inputs.reward_B)) != 0
    counts = torch.stack([torch.ones_like(advantage_B), informative_B.to(advantage_B.dtype)]).sum(1)
    episodes, informative = inputs.total(counts).unbind()
    return (episodes / informative.clamp(min=1) * advantage_B)[:, None] * inputs.mask_BT


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Tensor:
    """reward - mean of the group, whitened over the actions of all ranks, shape [B, T].

    Source: Hu et al. 2025 (REINFORCE++), arXiv 2501.03262.
    """
    return whiten(inputs.groups.deviations(inputs.reward_B)[:, None] * inputs.mask_BT, inputs.mask_BT, inputs.total)


def gigpo(
    inputs: AdvantageInputs, *, gamma: float, step_weight: float, divide_by_std: bool, epsilon: float = EPSILON
) -> Tensor:
    """Advantage of the episode within its group, plus step_weight times that of the turn, shape [B, T].

    The turn's is its return Σ_k gamma^k · (reward of the k-th turn after it) less the mean return of all turns of the
    group that began in the same state, here: after the same tokens of the env; 0 where no other did. Both are
    optionally over std + epsilon.

    Source: Feng et al. 2025 (GiGPO), arXiv 2505.10978, eq. 3 and 7; verl-agent, `core_gigpo.py`.
    """
    turn_BT, state_BT = required(inputs.turn_BT, "turn_BT"), required(inputs.state_BT, "state_BT")
    row_A, column_A = inputs.mask_BT.nonzero(as_tuple=True)
    turn_A = turn_BT[row_A, column_A]
    rewards_BU = torch.zeros_like(inputs.rewards_BT).index_put(
        (row_A, turn_A), inputs.rewards_BT[row_A, column_A], accumulate=True
    )
    states_BU = torch.zeros_like(state_BT).index_put((row_A, turn_A), state_BT[row_A, column_A])
    row_N, turn_N = torch.stack([row_A, turn_A]).unique(dim=1)
    keys_N2 = torch.stack([inputs.groups.index_B[row_N], states_BU[row_N, turn_N]], dim=1)
    distinct, state_N = keys_N2.unique(dim=0, return_inverse=True)
    returns_N = discounted_sum(rewards_BU, gamma)[row_N, turn_N]

    def relative(values: Tensor, groups: Groups) -> Tensor:
        return _standardised(values, groups, epsilon) if divide_by_std else groups.deviations(values)

    step_N = relative(returns_N, Groups(state_N, len(distinct)))
    steps_BU = torch.zeros_like(rewards_BU).index_put((row_N, turn_N), step_N)
    episode_B1 = relative(inputs.reward_B, inputs.groups)[:, None]
    return (episode_B1 + step_weight * steps_BU.gather(1, turn_BT)) * inputs.mask_BT


def rae_group(inputs: AdvantageInputs) -> Tensor:
    """Leave-one-out advantages of an episode's agents, each among those of its label in the group, shape [B, T].

    R_p - mean_j R_p^j, where R_p is what the agent of label p earned by itself, and what the episode earned besides;
    j are the group's other episodes with an agent of that label. 0 where there is none.

    Source: role-conditioned advantages, Liu et al. 2025 (SPIRAL), arXiv 2506.24119; their baseline is a moving average
    over training for each role of a game.
    """
    agent_BT = required(inputs.agent_BT, "agent_BT")
    own_BT = required(inputs.own_rewards_BT, "own_rewards_BT") * inputs.mask_BT
    row_A, column_A = inputs.mask_BT.nonzero(as_tuple=True)
    # M agents of all episodes, K labels of all groups
    members, member_A = torch.stack([row_A, agent_BT[row_A, column_A]]).unique(dim=1, return_inverse=True)
    row_M, label_M = members
    keys, of_label_M = torch.stack([inputs.groups.index_B[row_M], label_M]).unique(dim=1, return_inverse=True)
    earned_M = own_BT.new_zeros(len(row_M)).index_add(0, member_A, own_BT[row_A, column_A])
    reward_M = earned_M + (inputs.reward_B - own_BT.sum(-1))[row_M]
    same = Groups(of_label_M, keys.shape[1])
    size_M = same.size(reward_M.dtype)
    left_out_M = same.deviations(reward_M) * size_M / (size_M - 1).clamp(min=1)
    return torch.zeros_like(inputs.mask_BT).index_put((row_A, column_A), left_out_M[member_A])


def _standardised(values: Tensor, groups: Groups, epsilon: float) -> Tensor:
    return groups.deviations(values) / (groups.std(values) + epsilon)
