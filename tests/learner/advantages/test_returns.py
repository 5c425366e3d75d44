"""Rewards to go, with and without a discount."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.learner.algorithms.advantages.returns import discounted_sum, reinforce_plus_plus, remax, reward_to_go
from tests.learner.advantages.batches import batch, matrix


def test_a_reward_is_discounted_by_the_actions_before_it() -> None:
    ours_BT = reward_to_go(batch([[8.0, 1.0]], lengths=[4, 2]), 0.5)
    torch.testing.assert_close(ours_BT, matrix([1, 2, 4, 8], [0.5, 1, 0, 0]))


def test_rewards_of_single_actions_count_from_there_back() -> None:
    inputs = replace(batch([[0.0]], lengths=[3]), rewards_BT=matrix([-1, 5, 2]))
    torch.testing.assert_close(reward_to_go(inputs, 1.0), matrix([6, 7, 2]))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=20), st.sampled_from([0.0, 0.3, 0.9, 1.0]))
def test_discounted_sums_are_those_of_the_recursion(numbers: list[int], discount: float) -> None:
    expected = [0.0]
    for number in reversed(numbers):
        expected.insert(0, number + discount * expected[0])
    ours_BT = discounted_sum(matrix([float(number) for number in numbers]), discount)
    torch.testing.assert_close(ours_BT, matrix(expected[:-1]))


def test_every_row_may_have_its_own_discount() -> None:
    ours_BT = discounted_sum(matrix([0, 0, 1], [0, 0, 1]), matrix([0.5], [0]))
    torch.testing.assert_close(ours_BT, matrix([0.25, 0.5, 1], [0, 0, 1]))


def test_reinforce_plus_plus_is_the_whitened_reward_to_go() -> None:
    # To go 1, 2, 4 and 1: mean 2, variance (1 + 0 + 4 + 1) / 3 = 2.
    ours_BT = reinforce_plus_plus(batch([[4.0], [1.0]], lengths=[3, 1]), gamma=0.5)
    torch.testing.assert_close(ours_BT, matrix([-1, 0, 2], [-1, 0, 0]) / 2**0.5)


def test_remax_compares_with_the_greedy_answer_at_every_action() -> None:
    inputs = replace(batch([[0.0]], lengths=[2]), rewards_BT=matrix([-1, 3]), greedy_rewards_B=matrix([0.5])[0])
    torch.testing.assert_close(remax(inputs), matrix([1.5, 2.5]))
