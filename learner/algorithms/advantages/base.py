"""The inputs of advantages, and the signature of built-in and user-defined ones.

# B episodes of one rank's part of a training step, T actions of the longest, K reward terms
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from slipstream.learner.algorithms.advantages.groups import Groups

T = TypeVar("T")


def one_rank(values: Tensor) -> Tensor:
    """Sum over all ranks where there is one; a new tensor."""
    return values.clone()


@dataclass(frozen=True)
class RewardTerms:
    """The parts of the episodes' rewards."""

    values_KB: Tensor
    """Unweighted."""
    weights_K: Tensor
    """Weights in the reward."""


@dataclass(frozen=True)
class AdvantageInputs:
    """One rank's episodes of a training step, one row each, however many trajectories they left.

    A row holds the actions of all trajectories of its episode in their order. A group's episodes are all on one rank,
    in any order. Where an env has an algorithm of its own, its groups alone are the inputs; a rank may have none.
    """

    mask_BT: Tensor
    """1.0 where there is an action; every row has one or more, from the left."""
    rewards_BT: Tensor
    """Rewards of single turns at their last actions, the rest of the episode's reward at its last action; less the KL
    penalty at each action where `learner.kl.place` is `reward`."""
    groups: Groups
    terms: RewardTerms | None = None
    greedy_rewards_B: Tensor | None = None
    """Reward of the greedy answer to the same task (`remax`)."""
    values_BT: Tensor | None = None
    """The critic's value of the state before each action (`gae`)."""
    logprobs_BT: Tensor | None = None
    """log π_prox of the actions; None if it is not computed for the whole step before its first update. It is for
    `learner.kl.place: reward`, for corrections that normalise, reject or veto, for `optimal_token_baseline` and
    `online_dpo`."""
    reference_logprobs_BT: Tensor | None = None
    """log π_ref of the actions, with `learner.kl` (`online_dpo`)."""
    process_rewards_BT: Tensor | None = None
    """Implicit process reward of each action, with `learner.process_reward` (`prime`)."""
    collision_BT: Tensor | None = None
    """Σ_v π_prox(v)² of the distribution that each action was drawn from (`optimal_token_baseline`)."""
    turn_BT: Tensor | None = None
    """Index of each action's turn within its episode (`gigpo`)."""
    state_BT: Tensor | None = None
    """Hash of what the env showed before each action's turn (`gigpo`)."""
    agent_BT: Tensor | None = None
    """Hash of the label of the agent that each action's answer was given to (`rae_group`)."""
    own_rewards_BT: Tensor | None = None
    """Rewards of single answers and agents; a part of `rewards_BT` (`rae_group`)."""
    total: Callable[[Tensor], Tensor] = one_rank
    """Sum of a tensor over all ranks, as a new tensor; a collective, which all ranks must call equally often."""

    def of_rows(self, own_B: Tensor) -> Self:
        """The inputs of some groups alone.

        Args:
            own_B: true in the rows of these.
        """
        groups, index_B = self.groups.index_B[own_B].unique(return_inverse=True)
        chosen: dict[str, Any] = {name: value[own_B] for name, value in vars(self).items() if isinstance(value, Tensor)}
        terms = None if self.terms is None else replace(self.terms, values_KB=self.terms.values_KB[:, own_B])
        return replace(self, groups=Groups(index_B, len(groups)), terms=terms, **chosen)

    @property
    def reward_B(self) -> Tensor:
        """Each episode's reward, less its KL penalty."""
        # In float64: sums of different turns' rewards that are equal must stay so, or the group's std would not be 0.
        return (self.rewards_BT * self.mask_BT).sum(-1, dtype=torch.float64).to(self.rewards_BT.dtype)


Advantage = Callable[..., Tensor]
"""`(inputs: AdvantageInputs, **arguments) -> advantages [B, T]`, 0 outside the mask, without gradient."""


def required(value: T | None, name: str) -> T:
    """An optional input that the advantage requires."""
    assert value is not None, f"these advantages need AdvantageInputs.{name}"
    return value


def rewards_at_the_end(reward_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Each row's reward at its last action, shape [B, T]."""
    last_B = mask_BT.sum(-1).long() - 1
    return torch.zeros_like(mask_BT).scatter(1, last_B[:, None], reward_B[:, None].to(mask_BT.dtype))
