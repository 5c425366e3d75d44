"""Group-relative advantages, by hand and by their properties."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.learner.algorithms.advantages.base import AdvantageInputs, RewardTerms
from slipstream.learner.algorithms.advantages.group_relative import (
    dr_grpo,
    gdpo,
    gigpo,
    gpg,
    grpo,
    grpo_passk,
    max_rl,
    opo,
    penalise_length,
    prime,
    rae_group,
    reinforce_plus_plus_baseline,
    rloo,
)
from tests.learner.algorithms.advantages.batches import batch, matrix, vector

EPSILON = 1e-6
ALL: dict[str, Callable[[AdvantageInputs], Tensor]] = {
    "grpo": partial(grpo, epsilon=EPSILON), "dr_grpo": dr_grpo,
    "grpo_passk": partial(grpo_passk, divide_by_std=True, epsilon=EPSILON), "max_rl": max_rl, "rloo": rloo, "opo": opo,
    "gpg": partial(gpg, scale_up_for="no_advantage"),
}  # fmt: skip
CENTRED = [ALL[name] for name in ("grpo", "dr_grpo", "rloo", "gpg")]
GROUPS = st.lists(st.lists(st.integers(-9, 9).map(lambda tenths: tenths / 10), min_size=1, max_size=5), min_size=1)
LEAD: dict[str, Any] = {"divide_by_std": False, "epsilon": EPSILON}


def of_episodes(advantages_BT: Tensor) -> Tensor:
    """Each episode's advantage, which all of its actions share."""
    return advantages_BT[:, 0]


@pytest.mark.parametrize(
    ("advantage", "groups", "expected"),
    [
        (dr_grpo, [[1.0, 2.0, 6.0], [5.0, 3.0]], (-2, -1, 3, 1, -1)),
        # Mean 2, squared deviations 1 + 0 + 0 + 1, over 3; epsilon 1 - √(2/3).
        (partial(grpo, epsilon=1 - sqrt(2 / 3)), [[1.0, 2.0, 2.0, 3.0]], (-1, 0, 0, 1)),
        # Means 1/4, 3/4 and 0.
        (max_rl, [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0]], (3, -1, -1, -1, *[1 / 3] * 3, -1, 0, 0)),
        (max_rl, [[-1.0, 0.5], [2.0]], (0, 0, 0)),
        # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2; 1 - 5, 5 - 1; one episode.
        (rloo, [[1.0, 2.0, 6.0], [1.0, 5.0], [7.0]], (-3, -1.5, 4.5, -4, 4, 0)),
        (partial(grpo_passk, **LEAD), [[0.2, 0.9, 0.5], [0.9, 0.9, 0.5]], (0, 0.4, 0, 0, 0, 0)),
        (partial(grpo_passk, **LEAD), [[-2.0, -1.0], [0.7]], (0, 1, 0)),
        (partial(grpo_passk, divide_by_std=True, epsilon=0.5), [[0.0, 1.0, 2.0]], (0, 0, 1 / 1.5)),
        # Of 5 episodes 3 are in a group with spread; one at the mean of its group counts too.
        (ALL["gpg"], [[1.0, 2.0, 3.0], [1.0], [0.0]], (-5 / 3, 0, 5 / 3, 0, 0)),
        # Of 6 episodes 4 have a reward.
        (partial(gpg, scale_up_for="no_reward"), [[0.0, 0.0, 3.0], [1.0, 1.0, 1.0]], (-1.5, -1.5, 3, 0, 0, 0)),
        (ALL["gpg"], [[0.0, 0.0], [0.0]], (0, 0, 0)),
        (partial(gpg, scale_up_for="no_reward"), [[0.0, 0.0], [0.0]], (0, 0, 0)),
    ],
)
def test_figures_by_hand(
    advantage: Callable[[AdvantageInputs], Tensor], groups: list[list[float]], expected: tuple[float, ...]
) -> None:
    torch.testing.assert_close(of_episodes(advantage(batch(groups))), vector(*expected))


@pytest.mark.parametrize(
    ("advantage", "rewards", "expected_BT"),
    [
        (dr_grpo, [0.0, 1.0], matrix([-0.5, 0, 0], [0.5, 0.5, 0.5])),
        (opo, [0.0, 1.0], matrix([-0.75, 0, 0], [0.25, 0.25, 0.25])),  # mean (1 · 0 + 3 · 1) / 4
        # Deviations -1, 1, 1, 1 of the actions: mean 0.5, variance (2.25 + 3 · 0.25) / 3 = 1.
        (reinforce_plus_plus_baseline, [1.0, 3.0], matrix([-1.5, 0, 0], [0.5, 0.5, 0.5])),
    ],
)
def test_figures_by_hand_of_unequal_lengths(
    advantage: Callable[[AdvantageInputs], Tensor], rewards: list[float], expected_BT: Tensor
) -> None:
    torch.testing.assert_close(advantage(batch([rewards], lengths=[1, 3])), expected_BT)


def test_prime_adds_leave_one_out_advantages_of_outcome_and_process() -> None:
    """Outcomes 1, 0 and 0; mean process rewards 2, 1 and 0, of lengths 2, 1 and 1; a group of one has none."""
    process_BT = matrix([1, 3], [1, 9], [0, 9], [5, 5])
    inputs = replace(batch([[1.0, 0.0, 0.0], [1.0]], lengths=[2, 1, 1, 2]), process_rewards_BT=process_BT)
    # Less the others' means ½, 1 and 3/2: (½, 5/2), 0 and -3/2.
    expected_BT = matrix(
        [1 + 0.1 * (0.5 + 0.8 * 2.5), 1 + 0.1 * 2.5], [-0.5 + 0.1 * 0, 0], [-0.5 - 0.1 * 1.5, 0], [0, 0]
    )
    torch.testing.assert_close(prime(inputs, gamma=0.8, process_weight=0.1), expected_BT)
    without_actions = replace(
        batch([[1.0, 0.0]], lengths=[2, 1]), mask_BT=matrix([1, 1], [0, 0]), process_rewards_BT=matrix([1, 3], [9, 9])
    )
    torch.testing.assert_close(prime(without_actions, gamma=0.8, process_weight=0.1), matrix([1.34, 1.3], [0, 0]))


def test_gdpo_scales_terms_and_whitens_their_sum_over_episodes() -> None:
    inputs = replace(
        batch([[0.0, 0.0], [0.0, 0.0]], lengths=[1, 9, 1, 1]),
        terms=RewardTerms(matrix([0, 1, 0, 0], [100, 0, 0, 200]), vector(1, 3)),
    )
    # Two different values deviate by ∓1/√2 of their std, whatever their scale. So the sums are, in units of 1/√2,
    # (-1 + 3, 1 - 3, -3, 3); mean 0, variance (4 + 4 + 9 + 9) / 3.
    torch.testing.assert_close(of_episodes(gdpo(inputs, epsilon=1e-12)), vector(2, -2, -3, 3) / sqrt(26 / 3))


@pytest.mark.parametrize("advantage", ALL.values(), ids=ALL)
@pytest.mark.parametrize("rewards", [[0.0] * 4, [1.0] * 4, [0.1] * 6, [0.7]], ids=str)
def test_group_without_spread_has_no_advantage(
    advantage: Callable[[AdvantageInputs], Tensor], rewards: list[float]
) -> None:
    ours_BT = advantage(batch([rewards, [0.0, 1.0]], dtype=torch.float32))
    assert ours_BT[: len(rewards)].abs().max() == 0
    assert ours_BT[len(rewards) :].abs().max() > 0


@settings(deadline=None, max_examples=50)
@given(GROUPS)
def test_advantages_of_group_sum_to_zero(groups: list[list[float]]) -> None:
    inputs = batch(groups)
    for advantage in CENTRED:
        sums_B = inputs.groups.sum(of_episodes(advantage(inputs)))
        torch.testing.assert_close(sums_B, torch.zeros_like(sums_B), rtol=0, atol=1e-9)


def test_length_penalty_scales_with_pass_rate() -> None:
    """Pass rates 1, 1/2 and, of a negative mean, 0; lengths 1, 2 and 4 of at most 2 and 4."""
    inputs = batch([[1.0, 1.0], [1.0, 0.0], [-1.0, 0.0]], lengths=[1, 2, 4, 2, 4, 2])
    penalised = penalise_length(inputs, 0.2)
    torch.testing.assert_close(penalised.reward_B, vector(1 - 0.1, 1 - 0.2, 1 - 0.1, -0.05, -1, 0))
    torch.testing.assert_close(penalised.rewards_BT[0], vector(0.9, 0, 0, 0))
    torch.testing.assert_close(of_episodes(dr_grpo(penalised))[:4], vector(0.05, -0.05, 0.475, -0.475))


def test_each_agent_is_compared_with_those_of_its_label() -> None:
    """Agent 1 acts in all episodes, agent 2 in two of the first group, agent 3 in one; another group is apart."""
    inputs = replace(
        batch([[3.0, 1.0, 2.0], [5.0, 1.0]], lengths=[4, 3, 1, 1, 2]),
        rewards_BT=matrix([0, 0.5, 0, 2.5], [0, 1, 0, 0], [2, 0, 0, 0], [5, 0, 0, 0], [0, 1, 0, 0]),
        agent_BT=torch.tensor([[1, 2, 2, 1], [1, 2, 3, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]),
        own_rewards_BT=matrix([0, 0.5, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
    )
    # Besides the agents' own the episodes earned 2.5, 0 and 2: agent 1 has these, agent 2 has 2.5 + 0.5 and 0 + 1.
    expected_BT = matrix(
        [2.5 - 1, 3 - 1, 3 - 1, 2.5 - 1], [0 - 2.25, 1 - 3, 0, 0], [2 - 1.25, 0, 0, 0], [4, 0, 0, 0], [-4, -4, 0, 0]
    )
    torch.testing.assert_close(rae_group(inputs), expected_BT)
    alone = replace(inputs, agent_BT=torch.zeros_like(inputs.agent_BT))  # type: ignore[arg-type]
    torch.testing.assert_close(rae_group(alone), rloo(inputs))


def test_gigpo_compares_turns_of_same_state_within_group() -> None:
    """Three episodes of 2, 2 and 1 turns from state 7; two of them pass state 5, and so does another group's."""
    inputs = replace(
        batch([[0.0, 0.0, 0.0], [0.0]], lengths=[3, 2, 1, 1]),
        rewards_BT=matrix([0, 1, 1], [1, 0, 0], [0, 0, 0], [8, 0, 0]),
        turn_BT=torch.tensor([[0, 1, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0]]),
        state_BT=torch.tensor([[7, 5, 5], [7, 5, 0], [7, 0, 0], [5, 0, 0]]),
    )
    # Episodes: 2, 1 and 0 of mean 1. Returns from state 7: 0.5 · 2, 1 and 0 of mean 2/3; from state 5: 2 and 0.
    expected_BT = matrix([1 + 1 / 3, 1 + 1, 1 + 1], [0 + 1 / 3, 0 - 1, 0], [-1 - 2 / 3, 0, 0], [0, 0, 0])
    torch.testing.assert_close(gigpo(inputs, gamma=0.5, step_weight=1.0, divide_by_std=False), expected_BT)
    episodes_BT = gigpo(inputs, gamma=0.5, step_weight=0.0, divide_by_std=True, epsilon=1.0)
    torch.testing.assert_close(of_episodes(episodes_BT), vector(0.5, 0, -0.5, 0))
