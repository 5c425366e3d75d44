"""Quadratic penalties on the log ratio."""

import math

import pytest

from slipstream.learner.algorithms.losses.clipped import dro, kimi
from tests.learner.losses.examples import answer, gradient, one_action


@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0])
def test_dro_pulls_each_action_back_to_the_proximal_policy(advantage: float) -> None:
    log_ratio = math.log(1.5)
    expected = (advantage + 0.25 * log_ratio**2, -advantage + 0.5 * log_ratio, 0)  # log π_θ = -1
    assert one_action(dro, 1.5, advantage, beta=0.5) == pytest.approx(expected)


def test_kimi_pulls_the_answer_as_a_whole_back_to_the_proximal_policy() -> None:
    inputs = answer([1.5, 2.0, 1.0], [2.0, 2.0, 2.0])
    terms = kimi(inputs, tau=0.1)
    log_ratio = math.log(3.0)
    assert terms.loss_BT.sum().item() == pytest.approx(3 * 2.0 + 0.05 * log_ratio**2)
    assert gradient(terms.loss_BT.sum(), inputs).tolist() == [pytest.approx([-2.0 + 0.1 * log_ratio] * 3)]


def test_ratios_that_cancel_cost_nothing_in_kimi() -> None:
    inputs = answer([2.0, 0.5], [0.0, 0.0])
    assert kimi(inputs, tau=0.1).loss_BT.sum().item() == pytest.approx(0.0)
