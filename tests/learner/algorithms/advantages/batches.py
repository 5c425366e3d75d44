"""Training steps for tests of advantages: small ones by hand, and that of the reference figures."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from slipstream.learner.algorithms.advantages.base import AdvantageInputs, RewardTerms, rewards_at_the_end
from slipstream.learner.algorithms.advantages.groups import Groups
from tests.learner.algorithms.golden import INPUTS, SHAPE

ARGUMENTS: Final[dict[str, dict[str, Any]]] = {
    "grpo": {"epsilon": 1e-6}, "dr_grpo": {}, "grpo_passk": {"divide_by_std": False, "epsilon": 1e-6},
    "gdpo": {"epsilon": 1e-6}, "max_rl": {}, "rloo": {}, "opo": {}, "remax": {}, "reinforce_plus_plus": {"gamma": 0.9},
    "reinforce_plus_plus_baseline": {}, "gpg": {"scale_up_for": "no_advantage"},
    "gae": {"gamma": 0.99, "lam": 0.95, "length_adaptive": None}, "optimal_token_baseline": {"epsilon": 1e-8},
    "prime": {"gamma": 0.9, "process_weight": 0.5}, "win_rate": {}, "rae_group": {},
    "online_dpo": {"beta": 0.5, "pairs": "all"},
    "gigpo": {"gamma": 0.9, "step_weight": 0.5, "divide_by_std": False, "epsilon": 1e-6},
}  # fmt: skip
"""Arguments of the built-in advantages."""
ROWS = (
    "mask_BT", "rewards_BT", "greedy_rewards_B", "values_BT", "logprobs_BT", "collision_BT", "turn_BT", "state_BT",
    "reference_logprobs_BT", "process_rewards_BT", "agent_BT", "own_rewards_BT",
)  # fmt: skip
"""Tensors with a row for each episode."""


def matrix(*rows: Sequence[float]) -> Tensor:
    """A matrix in double precision."""
    return torch.tensor(rows, dtype=torch.float64)


def vector(*numbers: float) -> Tensor:
    """A vector in double precision."""
    return torch.tensor(numbers, dtype=torch.float64)


def batch(
    groups: Sequence[Sequence[float]], lengths: Sequence[int] | None = None, dtype: torch.dtype = torch.float64
) -> AdvantageInputs:
    """Groups of episodes with these rewards; each has two actions if the lengths aren't given."""
    sizes = torch.tensor([len(group) for group in groups])
    lengths_B = torch.tensor(lengths if lengths is not None else [2] * int(sizes.sum()))
    mask_BT = (torch.arange(int(lengths_B.max())) < lengths_B[:, None]).to(dtype)
    reward_B = torch.tensor([reward for group in groups for reward in group], dtype=dtype)
    return AdvantageInputs(
        mask_BT=mask_BT,
        rewards_BT=rewards_at_the_end(reward_B, mask_BT),
        groups=Groups(torch.repeat_interleave(torch.arange(len(groups)), sizes), len(groups)),
    )


def golden_batch() -> AdvantageInputs:
    """The batch of the reference figures, with log-probs, collisions and reward terms of our own."""
    probability_BT = INPUTS["target_logprobs"].exp()
    turn_BT = (torch.arange(SHAPE["tokens"]) // 3).repeat(SHAPE["rows"], 1)
    return AdvantageInputs(
        mask_BT=INPUTS["mask"], rewards_BT=rewards_at_the_end(INPUTS["reward"], INPUTS["mask"]),
        groups=Groups(torch.arange(SHAPE["rows"]) // SHAPE["group_size"], SHAPE["groups"]),
        terms=RewardTerms(torch.stack([INPUTS["reward"], INPUTS["mask"].sum(-1)]), vector(1.0, -0.3)),
        greedy_rewards_B=INPUTS["greedy_reward"], values_BT=INPUTS["values"], logprobs_BT=INPUTS["target_logprobs"],
        collision_BT=collision_of_two(probability_BT), turn_BT=turn_BT, state_BT=turn_BT.flip(0) // 2,
        agent_BT=turn_BT % 2 - 1, own_rewards_BT=INPUTS["values"] / 4,
        reference_logprobs_BT=INPUTS["reference_logprobs"], process_rewards_BT=INPUTS["values"].flip(0),
    )  # fmt: skip


def collision_of_two(probability_BT: Tensor) -> Tensor:
    """Σ π² where each action is one of two tokens."""
    return probability_BT**2 + (1 - probability_BT) ** 2


def rows(inputs: AdvantageInputs, order: Tensor) -> AdvantageInputs:
    """Those rows, in that order; the groups keep their numbers."""
    chosen = {name: value[order] for name in ROWS if (value := getattr(inputs, name)) is not None}
    terms = inputs.terms and replace(inputs.terms, values_KB=inputs.terms.values_KB[:, order])
    return replace(inputs, **chosen, groups=replace(inputs.groups, index_B=inputs.groups.index_B[order]), terms=terms)
