"""PPO's clipped surrogate, action by action."""

import pytest

from slipstream.learner.algorithms.losses.clipped import ppo
from tests.learner.losses.examples import one_action


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 1.5, -1.5, -1.5, 0),
        (1.1, 2.0, -2.2, -2.2, 0),  # within the clip: -r·A, and so is its gradient
        (1.1, -2.0, 2.2, 2.2, 0),
        (1.5, 2.0, -2.6, 0.0, 1),  # good, and pushed far enough
        (0.5, -2.0, 1.6, 0.0, 1),  # bad, and pushed far enough
        (1.5, -2.0, 3.0, 3.0, 0),  # bad, and it went the wrong way: not clipped
        (0.5, 2.0, -1.0, -1.0, 0),
        (1.5, 0.0, 0.0, 0.0, 0),
    ],
)
def test_loss_and_gradient_of_one_action(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: int
) -> None:
    found = one_action(ppo, ratio, advantage, clip_low=0.2, clip_high=0.3, dual_clip=None)
    assert found == pytest.approx((loss, gradient, clipped))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (2.9, -2.0, 5.8, 5.8, 0),
        (3.1, -2.0, 6.0, 0.0, 1),
        (0.5, -2.0, 1.6, 0.0, 1),
        (3.1, 2.0, -2.6, 0.0, 1),  # good: it was clipped before
    ],
)
def test_a_dual_clip_bounds_what_bad_actions_lose(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: int
) -> None:
    found = one_action(ppo, ratio, advantage, clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    assert found == pytest.approx((loss, gradient, clipped))
