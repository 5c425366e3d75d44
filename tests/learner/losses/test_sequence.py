"""Trust regions around whole answers."""

import math

import pytest
import torch

from slipstream.learner.algorithms.losses.clipped import gmpo, gspo
from tests.learner.losses.examples import answer, gradient


@pytest.mark.parametrize(
    ("ratios", "advantage", "loss", "own_gradient", "clipped"),
    [
        ([1.21, 1.0], 2.0, -2.2, -2.2, 0.0),  # s = 1.1: the first action alone is far out, the answer is not
        ([1.69, 1.0], 2.0, -2.4, 0.0, 1.0),  # s = 1.3
        ([1.69, 1.0], -2.0, 2.6, 2.6, 0.0),
        ([0.25, 1.0], -2.0, 1.6, 0.0, 1.0),  # s = 0.5
    ],
)
def test_gspo_clips_the_answers_geometric_mean_ratio(
    ratios: list[float], advantage: float, loss: float, own_gradient: float, clipped: float
) -> None:
    inputs = answer(ratios, [advantage] * 2)
    terms = gspo(inputs, clip_low=0.2, clip_high=0.2)
    assert terms.loss_BT.tolist() == [pytest.approx([loss] * 2)]
    assert terms.clipped_BT.tolist() == [[clipped] * 2]
    # Of the mean over the answer's actions: each action has half.
    assert gradient(terms.loss_BT.mean(), inputs).tolist() == [pytest.approx([own_gradient / 2] * 2)]


def test_in_gspo_each_action_has_its_own_advantage() -> None:
    inputs = answer([1.21, 1.0], [1.0, -2.0])
    terms = gspo(inputs, clip_low=0.2, clip_high=0.2)
    torch.testing.assert_close(gradient(terms.loss_BT.sum(), inputs), torch.tensor([[-1.1, 2.2]]).double())


@pytest.mark.parametrize(
    ("ratios", "advantage", "loss", "own_gradient", "clipped"),
    [
        ([1.21, 1.0], 2.0, -2.2, [-1.1, -1.1], [0, 0]),
        ([4.0, 1.0], 0.5, -0.5 * math.exp(0.2), [0.0, -0.25 * math.exp(0.2)], [1, 0]),  # at most e^0.4 of the first
        ([4.0, 1.0], -2.0, 4.0, [2.0, 2.0], [0, 0]),  # bad, and it went the wrong way
        ([0.25, 1.0], -2.0, 2 * math.exp(-0.3), [0.0, math.exp(-0.3)], [1, 0]),  # at least e^-0.6
        ([0.25, 1.0], 2.0, -1.0, [-0.5, -0.5], [0, 0]),
        ([0.25, 4.0], 0.0, 0.0, [0.0, 0.0], [0, 0]),
    ],
)
def test_gmpo_is_the_geometric_mean_of_the_clipped_ratios(
    ratios: list[float], advantage: float, loss: float, own_gradient: list[float], clipped: list[float]
) -> None:
    inputs = answer(ratios, [advantage] * 2)
    terms = gmpo(inputs, clip_low=0.6, clip_high=0.4)
    assert terms.loss_BT.tolist() == [pytest.approx([loss] * 2)]
    assert terms.clipped_BT.tolist() == [clipped]
    assert gradient(terms.loss_BT.mean(), inputs).tolist() == [pytest.approx(own_gradient)]
