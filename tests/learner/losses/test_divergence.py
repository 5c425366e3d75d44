"""Trust regions of a bounded divergence."""

import math
from collections.abc import Callable

import pytest

from slipstream.learner.algorithms.losses.base import LossTerms
from slipstream.learner.algorithms.losses.selective import dppo_kl, dppo_tv
from tests.learner.losses.examples import answer, gradient


def weight(
    loss: Callable[..., LossTerms], proximal: float, target: float, advantage: float, *, clip: float, cap: float = 20.0
) -> tuple[float, float]:
    """What the policy gradient of one action with these probabilities is multiplied by, and `clipped`."""
    inputs = answer([target / proximal], [advantage], logprob=math.log(target))
    terms = loss(inputs, clip_low=clip, clip_high=2 * clip, cap=cap)
    return -gradient(terms.loss_BT.sum(), inputs).item() / advantage, terms.clipped_BT.item()


@pytest.mark.parametrize(
    ("proximal", "target", "advantage", "expected"),
    [
        (0.5, 0.65, 1.0, (1.3, 0)),  # 0.15 up: within
        (0.5, 0.75, 1.0, (0.0, 1)),  # 0.25 up
        (0.5, 0.75, -1.0, (1.5, 0)),  # the advantage pulls it back
        (0.5, 0.45, -1.0, (0.9, 0)),
        (0.5, 0.35, -1.0, (0.0, 1)),  # 0.15 down
        (0.5, 0.35, 1.0, (0.7, 0)),
        (0.01, 0.05, 1.0, (5.0, 0)),  # a rare token may grow by much
        (0.001, 0.1, 1.0, (20.0, 1)),  # but counts up to the cap
    ],
)
def test_dppo_tv_stops_what_leaves_the_region_of_total_variation(
    proximal: float, target: float, advantage: float, expected: tuple[float, float]
) -> None:
    assert weight(dppo_tv, proximal, target, advantage, clip=0.1) == pytest.approx(expected)


def binary_kl(proximal: float, target: float) -> float:
    return proximal * math.log(proximal / target) + (1 - proximal) * math.log((1 - proximal) / (1 - target))


@pytest.mark.parametrize(("proximal", "target"), [(0.5, 0.75), (0.2, 0.1), (0.97, 0.9), (0.01, 0.03)])
@pytest.mark.parametrize("share", [0.99, 1.01])
def test_dppo_kl_stops_what_leaves_the_region_of_binary_kl(proximal: float, target: float, share: float) -> None:
    away = 1.0 if target > proximal else -1.0
    bound = binary_kl(proximal, target) * share / (2 if away > 0 else 1)
    expected = (target / proximal, 0) if share > 1 else (0.0, 1)
    assert weight(dppo_kl, proximal, target, away, clip=bound) == pytest.approx(expected)
    assert weight(dppo_kl, proximal, target, -away, clip=bound) == pytest.approx((target / proximal, 0))


@pytest.mark.parametrize(
    ("proximal", "target", "advantage", "expected"),
    [(1.0, 1.0, -1.0, (1.0, 0)), (1.0, 0.98, -1.0, (0.98, 0)), (1.0, 0.9, -1.0, (0.0, 1)), (0.9, 1.0, 1.0, (0.0, 1))],
)
def test_a_token_that_was_or_is_certain_has_a_divergence_too(
    proximal: float, target: float, advantage: float, expected: tuple[float, float]
) -> None:
    assert weight(dppo_kl, proximal, target, advantage, clip=0.05) == pytest.approx(expected)
