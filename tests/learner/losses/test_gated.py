"""The sigmoid gate."""

import math

import pytest

from slipstream.learner.algorithms.losses.clipped import sapo
from tests.learner.losses.examples import one_action


def test_a_good_action_has_one_steepness_and_another_action_the_other() -> None:
    good, bad = 4 / (1 + math.exp(-1.0 * 0.5)), 4 / 2.0 / (1 + math.exp(-2.0 * 0.5))
    assert one_action(sapo, 1.5, 3.0, tau_positive=1.0, tau_negative=2.0)[0] == pytest.approx(-3 * good)
    assert one_action(sapo, 1.5, -3.0, tau_positive=1.0, tau_negative=2.0)[0] == pytest.approx(3 * bad)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_the_gradient_dies_away_far_from_the_proximal_policy(advantage: float) -> None:
    near, far = (
        abs(one_action(sapo, ratio, advantage, tau_positive=1.0, tau_negative=1.05)[1]) for ratio in (1.0, 20.0)
    )
    assert near == pytest.approx(2.0)
    assert far < 1e-5
