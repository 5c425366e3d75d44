"""The optimal token baseline by hand."""

from dataclasses import replace

import torch
from torch import Tensor

from slipstream.learner.algorithms.advantages.base import AdvantageInputs
from slipstream.learner.algorithms.advantages.returns import optimal_token_baseline
from tests.learner.advantages.batches import batch, matrix


def of_coins(rewards: list[float], probability_BT: Tensor, lengths: list[int]) -> AdvantageInputs:
    """Every action is one of two tokens, so that 1 - 2 π + Σ π² = 2 (1 - π)²."""
    collision_BT = probability_BT**2 + (1 - probability_BT) ** 2
    return replace(batch([rewards], lengths), logprobs_BT=probability_BT.log(), collision_BT=collision_BT)


def test_the_norm_is_that_of_the_gradient_with_respect_to_the_logits() -> None:
    logits_V = torch.randn(5, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    probability_V = logits_V.softmax(0).detach()
    (gradient_V,) = torch.autograd.grad(logits_V.log_softmax(0)[2], logits_V)
    proxy = 1 - 2 * probability_V[2] + probability_V.square().sum()
    torch.testing.assert_close(gradient_V.square().sum(), proxy)


def test_the_baseline_is_the_mean_weighted_by_the_norms_so_far() -> None:
    # Norms 2 (1 - π)²: 0.5 and 0.02 of the first answer's actions, 0.5 and 0.5 of the second's.
    inputs = of_coins([1.0, 3.0], matrix([0.5, 0.9], [0.5, 0.5]), [2, 2])
    first = (0.5 * 1 + 0.5 * 3) / 1.0
    second = (0.52 * 1 + 1.0 * 3) / 1.52
    expected_BT = matrix([1 - first, 1 - second], [3 - first, 3 - second])
    torch.testing.assert_close(optimal_token_baseline(inputs, epsilon=1e-12), expected_BT)


def test_an_answer_that_has_ended_has_no_say_any_more() -> None:
    inputs = of_coins([1.0, 3.0, 5.0], torch.full((3, 2), 0.5, dtype=torch.float64), [1, 2, 2])
    expected_BT = matrix([-2, 0], [0, -1], [2, 1])
    torch.testing.assert_close(optimal_token_baseline(inputs, epsilon=1e-12), expected_BT)


def test_it_is_the_reward_still_to_come_that_counts() -> None:
    inputs = of_coins([0.0, 0.0], torch.full((2, 2), 0.5, dtype=torch.float64), [2, 2])
    inputs = replace(inputs, rewards_BT=matrix([4, 1], [0, 1]))
    torch.testing.assert_close(optimal_token_baseline(inputs, epsilon=1e-12), matrix([2, 0], [-2, 0]))


def test_epsilon_is_added_to_the_sum_of_the_weights() -> None:
    inputs = of_coins([2.0], matrix([0.5]), [1])
    torch.testing.assert_close(optimal_token_baseline(inputs, epsilon=0.5), matrix([1]))


def test_sure_actions_leave_finite_advantages() -> None:
    inputs = of_coins([1.0, 0.0], torch.ones(2, 3, dtype=torch.float64), [3, 3])
    # As rounding has it: the norm of a sure action comes out below 0.
    inputs = replace(inputs, collision_BT=torch.full((2, 3), 1 - 1e-7, dtype=torch.float64))
    torch.testing.assert_close(optimal_token_baseline(inputs, epsilon=1e-8), matrix([1, 1, 1], [0, 0, 0]))
