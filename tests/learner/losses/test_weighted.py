"""Weights of the policy gradient."""

from dataclasses import replace

import pytest
import torch

from slipstream.learner.algorithms.losses.clipped import cispo, reinforce, topr
from tests.learner.losses.examples import answer, gradient, one_action


@pytest.mark.parametrize("ratio", [0.1, 1.0, 7.0])
def test_reinforce_does_not_look_at_the_ratio(ratio: float) -> None:
    assert one_action(reinforce, ratio, 2.0) == pytest.approx((2.0, -2.0, 0))


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [
        (1.1, 2.0, 1.1, 0),
        (1.1, -2.0, 1.1, 0),
        (1.5, 2.0, 1.3, 1),  # beyond the clip too there is a gradient
        (1.5, -2.0, 1.3, 1),
        (0.5, 2.0, 0.8, 1),
        (0.5, -2.0, 0.8, 1),
    ],
)
def test_cispo_weighs_with_the_clipped_ratio(ratio: float, advantage: float, weight: float, clipped: int) -> None:
    found = one_action(cispo, ratio, advantage, clip_low=0.2, clip_high=0.3)
    assert found == pytest.approx((weight * advantage, -weight * advantage, clipped))  # log π_θ = -1


@pytest.mark.parametrize(
    ("ratios", "advantage", "weight", "clipped"),
    [
        ([0.5, 0.5], -1.0, 0.25, 0.0),  # a product, not a mean
        ([3.0, 0.5], -1.0, 1.2, 1.0),
        ([0.5, 0.5], 0.5, 1.0, 0.0),  # good answers count fully
        ([3.0, 3.0], 1.0, 1.0, 0.0),
    ],
)
def test_topr_weighs_bad_answers_with_their_truncated_ratio_to_the_behaviour_policy(
    ratios: list[float], advantage: float, weight: float, clipped: float
) -> None:
    inputs = answer(ratios, [advantage] * 2)
    inputs = replace(inputs, proximal_logprobs_BT=torch.zeros_like(inputs.mask_BT))
    terms = topr(inputs, cap=1.2)
    assert gradient(terms.loss_BT.sum(), inputs).tolist() == [pytest.approx([-weight * advantage] * 2)]
    assert terms.clipped_BT.tolist() == [[clipped] * 2]
