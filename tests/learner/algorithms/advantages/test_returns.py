"""Advantages from returns, by hand: rewards to go, generalised advantage estimates, the optimal token baseline."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.learner.algorithms.advantages.base import AdvantageInputs, one_rank
from slipstream.learner.algorithms.advantages.groups import whiten
from slipstream.learner.algorithms.advantages.returns import (
    discounted_sum,
    gae,
    optimal_token_baseline,
    reinforce_plus_plus,
    remax,
    reward_to_go,
    value_returns,
)
from tests.learner.algorithms.advantages.batches import batch, collision_of_two, golden_batch, matrix, vector

# --- rewards to go ---------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=20), st.sampled_from([0.0, 0.3, 0.9, 1.0]))
def test_discounted_sums_are_those_of_recursion(numbers: list[int], discount: float) -> None:
    expected = [0.0]
    for number in reversed(numbers):
        expected.insert(0, number + discount * expected[0])
    torch.testing.assert_close(discounted_sum(matrix(numbers), discount), matrix(expected[:-1]))


@pytest.mark.parametrize(
    ("rewards_BT", "discount", "expected_BT"),
    [
        (matrix([0, 0, 0, 8], [0, 1, 0, 0]), 0.5, matrix([1, 2, 4, 8], [0.5, 1, 0, 0])),
        (matrix([-1, 5, 0, 2], [3, 4, 0, 0]), 1.0, matrix([6, 7, 2, 2], [7, 4, 0, 0])),
    ],
)
def test_rewards_count_from_their_action_back(rewards_BT: Tensor, discount: float, expected_BT: Tensor) -> None:
    inputs = replace(batch([[0.0, 0.0]], lengths=[4, 2]), rewards_BT=rewards_BT)
    torch.testing.assert_close(reward_to_go(inputs, discount), expected_BT)


def test_reinforce_plus_plus_whitens_reward_to_go() -> None:
    # To go 1, 2, 4 and 1: mean 2, variance (1 + 0 + 4 + 1) / 3 = 2.
    ours_BT = reinforce_plus_plus(batch([[4.0], [1.0]], lengths=[3, 1]), gamma=0.5)
    torch.testing.assert_close(ours_BT, matrix([-1, 0, 2], [-1, 0, 0]) / 2**0.5)


def test_remax_subtracts_greedy_reward_at_each_action() -> None:
    inputs = replace(batch([[0.0]], lengths=[2]), rewards_BT=matrix([-1, 3]), greedy_rewards_B=vector(0.5))
    torch.testing.assert_close(remax(inputs), matrix([1.5, 2.5]))


# --- generalised advantage estimation --------------------------------------------------------------------------------


def with_values(rewards: list[float], values_BT: Tensor, lengths: list[int]) -> AdvantageInputs:
    return replace(batch([rewards], lengths), values_BT=values_BT)


@pytest.mark.parametrize(("lam", "expected"), [(0.0, [0.0 + 2, 6 + 4]), (0.5, [0.25 * 6 + 2, 6 + 4]), (1.0, [5, 10])])
def test_returns_discount_differences_by_lambda(lam: float, expected: list[float]) -> None:
    # Temporal differences 0.5 · 4 - 2 = 0 and 10 - 4 = 6.
    returns_BT = value_returns(with_values([10.0], matrix([2, 4]), [2]), gamma=0.5, lam=lam)
    torch.testing.assert_close(returns_BT, matrix(expected))


def test_monte_carlo_returns_do_not_depend_on_values() -> None:
    inputs = replace(golden_batch(), values_BT=torch.randn(golden_batch().mask_BT.shape).double().requires_grad_())
    returns_BT = value_returns(inputs, gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns_BT, inputs.reward_B[:, None] * inputs.mask_BT)
    assert not returns_BT.requires_grad


def test_gae_whitens_returns_less_values() -> None:
    inputs = golden_batch()
    assert inputs.values_BT is not None
    raw_BT = value_returns(inputs, gamma=0.9, lam=0.8) - inputs.values_BT * inputs.mask_BT
    ours_BT = gae(inputs, gamma=0.9, lam=0.8, length_adaptive=None)
    torch.testing.assert_close(ours_BT, whiten(raw_BT, inputs.mask_BT, one_rank))


def test_length_adaptive_lambda() -> None:
    # a = 0.4: λ = 1 - 1/(0.4 · 5) = 0.5 for five actions, and 1 - 1/(0.4 · 2) < 0 for two, which counts as 0.
    inputs = with_values([16.0, 5.0], matrix([0, 0, 0, 0, 0], [3, 1, 0, 0, 0]), [5, 2])
    expected_BT = whiten(matrix([1, 2, 4, 8, 16], [-2, 4, 0, 0, 0]), inputs.mask_BT, one_rank)
    torch.testing.assert_close(gae(inputs, gamma=1.0, lam=1.0, length_adaptive=0.4), expected_BT)


# --- optimal token baseline ------------------------------------------------------------------------------------------


def of_two_tokens(rewards: list[float], probability_BT: Tensor, lengths: list[int]) -> AdvantageInputs:
    """Actions with these probabilities, so that the squared norm 1 - 2 π + Σ π² is 2 (1 - π)²."""
    collision_BT = collision_of_two(probability_BT)
    return replace(batch([rewards], lengths), logprobs_BT=probability_BT.log(), collision_BT=collision_BT)


HALF = matrix([0.5, 0.5], [0.5, 0.5], [0.5, 0.5])


@pytest.mark.parametrize(
    ("inputs", "epsilon", "expected_BT"),
    [
        # Norms 0.5 and 0.02 of the first episode's actions, 0.5 and 0.5 of the second's.
        (
            of_two_tokens([1.0, 3.0], matrix([0.5, 0.9], [0.5, 0.5]), [2, 2]), 1e-12,
            matrix([1 - 2, 1 - 3.52 / 1.52], [3 - 2, 3 - 3.52 / 1.52]),
        ),
        (of_two_tokens([1.0, 3.0, 5.0], HALF, [1, 2, 2]), 1e-12, matrix([-2, 0], [0, -1], [2, 1])),
        (
            replace(of_two_tokens([0.0, 0.0], HALF[:2], [2, 2]), rewards_BT=matrix([4, 1], [0, 1])), 1e-12,
            matrix([2, 0], [-2, 0]),
        ),
        (of_two_tokens([2.0], matrix([0.5]), [1]), 0.5, matrix([1])),
        # Rounding makes the norm of a certain action negative.
        (
            replace(of_two_tokens([1.0, 0.0], torch.ones_like(HALF[:2]), [2, 2]), collision_BT=HALF[:2] * 2 - 1e-7),
            1e-8, matrix([1, 1], [0, 0]),
        ),
    ],
    ids=["weighted mean", "ended episode", "reward to go", "epsilon", "certain actions"],
)  # fmt: skip
def test_optimal_token_baseline(inputs: AdvantageInputs, epsilon: float, expected_BT: Tensor) -> None:
    torch.testing.assert_close(optimal_token_baseline(inputs, epsilon=epsilon), expected_BT)
