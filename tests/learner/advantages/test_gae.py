"""Generalised advantage estimation by hand, and the critic's own returns."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.learner.algorithms.advantages.base import AdvantageInputs, alone
from slipstream.learner.algorithms.advantages.groups import whiten
from slipstream.learner.algorithms.advantages.returns import gae, value_returns
from tests.learner.advantages.batches import batch, golden_batch, matrix


def with_values(rewards: list[float], values_BT: Tensor, lengths: list[int]) -> AdvantageInputs:
    return replace(batch([rewards], lengths), values_BT=values_BT)


# Two actions, then reward 10: surprises 0.5 * 4 - 2 = 0 and 10 - 4 = 6, which λ carries back.
TWO_STEPS = with_values([10.0], matrix([2, 4]), [2])


@pytest.mark.parametrize(
    ("lam", "expected"),
    [(0.0, [0.0 + 2, 6 + 4]), (0.5, [0.25 * 6 + 2, 6 + 4]), (1.0, [0.5 * 10, 10])],
    ids=["one step", "between", "Monte Carlo"],
)
def test_returns_carry_surprises_back_as_far_as_lambda_says(lam: float, expected: list[float]) -> None:
    torch.testing.assert_close(value_returns(TWO_STEPS, gamma=0.5, lam=lam), matrix(expected))


def test_monte_carlo_returns_don_t_depend_on_the_values() -> None:
    inputs = golden_batch()
    expected_BT = inputs.reward_B[:, None] * inputs.mask_BT
    torch.testing.assert_close(value_returns(inputs, gamma=1.0, lam=1.0), expected_BT)


def test_advantages_are_the_returns_less_the_values_whitened() -> None:
    inputs = golden_batch()
    assert inputs.values_BT is not None
    raw_BT = value_returns(inputs, gamma=0.9, lam=0.8) - inputs.values_BT * inputs.mask_BT
    ours_BT = gae(inputs, gamma=0.9, lam=0.8, length_adaptive=None)
    torch.testing.assert_close(ours_BT, whiten(raw_BT, inputs.mask_BT, alone))


def test_length_adaptive_lambda_is_one_less_one_over_a_times_length() -> None:
    # a = 0.4: λ = 1 - 1/(0.4 · 5) = 0.5 for five actions, and 1 - 1/(0.4 · 2) < 0 for two, which is taken as 0.
    inputs = with_values([16.0, 5.0], matrix([0, 0, 0, 0, 0], [3, 1, 0, 0, 0]), [5, 2])
    expected_BT = whiten(matrix([1, 2, 4, 8, 16], [-2, 4, 0, 0, 0]), inputs.mask_BT, alone)
    torch.testing.assert_close(gae(inputs, gamma=1.0, lam=1.0, length_adaptive=0.4), expected_BT)


def test_two_answers_of_one_length_have_the_lambda_of_that_length() -> None:
    inputs = with_values([8.0, 1.0], matrix([1, 2, 0, 1], [3, 1, 1, 0]), [4, 4])
    adaptive_BT = gae(inputs, gamma=0.9, lam=1.0, length_adaptive=1.0)
    torch.testing.assert_close(adaptive_BT, gae(inputs, gamma=0.9, lam=0.75, length_adaptive=None))


def test_returns_have_no_gradient() -> None:
    inputs = replace(TWO_STEPS, values_BT=matrix([2, 4]).requires_grad_())
    assert not value_returns(inputs, gamma=1.0, lam=1.0).requires_grad
