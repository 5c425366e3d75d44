"""Losses by hand that bound or weight ratios, of actions and of whole trajectories."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.learner.algorithms.aggregation import aggregate, totals_of
from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms
from slipstream.learner.algorithms.losses.clipped import (
    asympo,
    cispo,
    dro,
    gmpo,
    gspo,
    kimi,
    ppo,
    reinforce,
    sapo,
    sppo,
    topr,
    value_loss,
    vespo,
)
from tests.learner.algorithms.losses.batches import gradient, one_action, trajectory

PPO = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": None}
DUAL = PPO | {"dual_clip": 3.0}
CISPO = {"clip_low": 0.2, "clip_high": 0.3}
SAPO = {"tau_positive": 1.0, "tau_negative": 2.0}


def gate(tau: float, ratio: float) -> float:
    return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))


def slope(tau: float, ratio: float) -> float:
    share = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return 4 * share * (1 - share) * ratio


@pytest.mark.parametrize(
    ("loss", "arguments", "ratio", "advantage", "expected"),
    [
        (ppo, PPO, 1.0, 1.5, (-1.5, -1.5, 0)), (ppo, PPO, 1.1, 2.0, (-2.2, -2.2, 0)),
        (ppo, PPO, 1.1, -2.0, (2.2, 2.2, 0)), (ppo, PPO, 1.5, 2.0, (-2.6, 0.0, 1)),
        (ppo, PPO, 0.5, -2.0, (1.6, 0.0, 1)),
        (ppo, PPO, 1.5, -2.0, (3.0, 3.0, 0)),  # moved the wrong way: not clipped
        (ppo, PPO, 0.5, 2.0, (-1.0, -1.0, 0)), (ppo, PPO, 1.5, 0.0, (0.0, 0.0, 0)),
        (ppo, DUAL, 2.9, -2.0, (5.8, 5.8, 0)), (ppo, DUAL, 3.1, -2.0, (6.0, 0.0, 1)),
        (ppo, DUAL, 0.5, -2.0, (1.6, 0.0, 1)), (ppo, DUAL, 3.1, 2.0, (-2.6, 0.0, 1)),
        (reinforce, {}, 0.1, 2.0, (2.0, -2.0, 0)), (reinforce, {}, 7.0, 2.0, (2.0, -2.0, 0)),
        (cispo, CISPO, 1.1, 2.0, (2.2, -2.2, 0)), (cispo, CISPO, 1.1, -2.0, (-2.2, 2.2, 0)),
        (cispo, CISPO, 1.5, 2.0, (2.6, -2.6, 1)), (cispo, CISPO, 1.5, -2.0, (-2.6, 2.6, 1)),
        (cispo, CISPO, 0.5, 2.0, (1.6, -1.6, 1)), (sapo, SAPO, 1.5, 3.0, (-3 * gate(1, 1.5), -3 * slope(1, 1.5), 0)),
        (sapo, SAPO, 1.5, -3.0, (3 * gate(2, 1.5), 3 * slope(2, 1.5), 0)), (sapo, SAPO, 20.0, 1.0, (-4.0, 0.0, 0)),
        *[
            # log π_θ = -1; the pull towards π_prox has the log ratio's sign.
            (dro, {"beta": 0.5}, 1.5, sign, (sign + 0.25 * math.log(1.5) ** 2, -sign + 0.5 * math.log(1.5), 0))
            for sign in (2.0, -2.0, 0.0)
        ],
    ],
)  # fmt: skip
def test_loss_gradient_and_clip_of_one_action(
    loss: Callable[..., LossTerms],
    arguments: dict[str, Any],
    ratio: float,
    advantage: float,
    expected: tuple[float, float, float],
) -> None:
    assert one_action(loss, ratio, advantage, **arguments) == pytest.approx(expected, abs=1e-5)


GSPO = {"clip_low": 0.2, "clip_high": 0.2}
GMPO = {"clip_low": 0.6, "clip_high": 0.4}


@pytest.mark.parametrize(
    ("loss", "arguments", "ratios", "advantage", "value", "own_gradient", "clipped"),
    [
        (gspo, GSPO, [1.21, 1.0], 2.0, -2.2, [-1.1, -1.1], [0, 0]),  # s = 1.1
        (gspo, GSPO, [1.69, 1.0], 2.0, -2.4, [0.0, 0.0], [1, 1]),  # s = 1.3
        (gspo, GSPO, [1.69, 1.0], -2.0, 2.6, [1.3, 1.3], [0, 0]),
        (gspo, GSPO, [0.25, 1.0], -2.0, 1.6, [0.0, 0.0], [1, 1]),  # s = 0.5
        (gmpo, GMPO, [1.21, 1.0], 2.0, -2.2, [-1.1, -1.1], [0, 0]),
        (gmpo, GMPO, [4.0, 1.0], 0.5, -0.5 * math.exp(0.2), [0.0, -0.25 * math.exp(0.2)], [1, 0]),  # at most e^0.4
        (gmpo, GMPO, [4.0, 1.0], -2.0, 4.0, [2.0, 2.0], [0, 0]),
        (gmpo, GMPO, [0.25, 1.0], -2.0, 2 * math.exp(-0.3), [0.0, math.exp(-0.3)], [1, 0]),  # at least e^-0.6
        (gmpo, GMPO, [0.25, 1.0], 2.0, -1.0, [-0.5, -0.5], [0, 0]),
        (gmpo, GMPO, [0.25, 4.0], 0.0, 0.0, [0.0, 0.0], [0, 0]),
    ],
)
def test_geometric_mean_ratio_of_trajectory(
    loss: Callable[..., LossTerms],
    arguments: dict[str, float],
    ratios: list[float],
    advantage: float,
    value: float,
    own_gradient: list[float],
    clipped: list[float],
) -> None:
    inputs = trajectory(ratios, [advantage] * 2)
    terms = loss(inputs, **arguments)
    assert terms.loss_BT.tolist() == [pytest.approx([value] * 2)]
    assert terms.clipped_BT.tolist() == [clipped]
    assert gradient(terms.loss_BT.mean(), inputs).tolist() == [pytest.approx(own_gradient)]


def test_luspo_is_gspo_by_token_sums() -> None:
    """Each answer's clipped surrogate times its length, of lengths 3 and 1: s = 1.1 and, clipped, 1.2."""
    inputs = LossInputs(
        logprobs_BT=torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True),
        proximal_logprobs_BT=-1 - torch.tensor([[3 * math.log(1.1), 0, 0], [math.log(1.5), 0, 0]]).double(),
        behaviour_logprobs_BT=torch.zeros(2, 3).double(),
        advantages_BT=torch.tensor([[2.0] * 3, [5.0] * 3]).double(),
        mask_BT=torch.tensor([[1.0, 1, 1], [1, 0, 0]]).double(),
    )
    terms = gspo(inputs, **GSPO)
    loss = aggregate(
        terms.loss_BT, inputs.mask_BT, "seq-mean-token-sum", totals_of(inputs.mask_BT), horizon=1, constant=None
    )
    assert loss.item() == pytest.approx(-(3 * 1.1 * 2 + 1 * 1.2 * 5) / 2)
    # Of 3·s: s in each action, as s has a third of it.
    torch.testing.assert_close(gradient(loss, inputs), torch.tensor([[-1.1] * 3, [0.0] * 3]).double())


def test_gspo_keeps_advantages_of_actions_apart() -> None:
    inputs = trajectory([1.21, 1.0], [1.0, -2.0])
    torch.testing.assert_close(
        gradient(gspo(inputs, **GSPO).loss_BT.sum(), inputs), torch.tensor([[-1.1, 2.2]]).double()
    )


@pytest.mark.parametrize(
    ("ratios", "advantage", "weight", "clipped"),
    [
        ([0.5, 0.5], -1.0, 0.25, 0.0),  # a product, not a mean
        ([3.0, 0.5], -1.0, 1.2, 1.0), ([0.5, 0.5], 0.5, 1.0, 0.0), ([3.0, 3.0], 1.0, 1.0, 0.0),
    ],
)  # fmt: skip
def test_topr_truncates_behaviour_ratio_of_bad_trajectories(
    ratios: list[float], advantage: float, weight: float, clipped: float
) -> None:
    inputs = trajectory(ratios, [advantage] * 2)
    inputs = replace(inputs, proximal_logprobs_BT=torch.zeros_like(inputs.mask_BT))
    terms = topr(inputs, cap=1.2)
    assert gradient(terms.loss_BT.sum(), inputs).tolist() == [pytest.approx([-weight * advantage] * 2)]
    assert terms.clipped_BT.tolist() == [[clipped] * 2]


@pytest.mark.parametrize(
    ("ratios", "advantage", "weight"),
    [
        ([1.0, 1.0], 2.0, 1.0), ([1.0, 1.0], -2.0, 1.0),
        ([0.5, 0.5], 2.0, 0.25**2 * math.exp(3 * 0.75)), ([0.5, 0.5], -2.0, 0.25**3 * math.exp(2 * 0.75)),
        ([4.0, 0.5], 1.0, 2.0**2 * math.exp(-3)), ([4.0, 0.5], -1.0, 2.0**3 * math.exp(-2)),
        ([100.0, 100.0], -1.0, 0.0),
    ],
)  # fmt: skip
def test_vespo_weighs_by_kernel_of_behaviour_ratio(ratios: list[float], advantage: float, weight: float) -> None:
    inputs = trajectory(ratios, [advantage] * 2)
    inputs = replace(inputs, proximal_logprobs_BT=torch.zeros_like(inputs.mask_BT))
    terms = vespo(inputs, positive=(2.0, 3.0), negative=(3.0, 2.0))
    assert gradient(terms.loss_BT.sum(), inputs).tolist() == [pytest.approx([-weight * advantage] * 2)]


def test_asympo_losses_of_group_cancel() -> None:
    """Whatever the answers' likelihoods: -log π of 1 and 3, of 0.5 and 0.5, and of a certain one."""
    logprobs_BT = torch.tensor([[-1.0, -3.0], [-0.5, -0.5], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    advantages_BT = torch.tensor([[2.0], [-2.0], [1.0]], dtype=torch.float64).expand(3, 2)
    one_BT = torch.ones_like(logprobs_BT)
    inputs = LossInputs(logprobs_BT, one_BT, one_BT, advantages_BT, one_BT)
    loss_BT = asympo(inputs).loss_BT
    assert loss_BT.tolist() == [[1.0, 3.0], [-2.0, -2.0], [0.0, 0.0]]
    expected_BT = torch.tensor([[-1.0] * 2, [4.0] * 2, [-1000.0] * 2], dtype=torch.float64)
    torch.testing.assert_close(gradient(loss_BT.sum(), inputs), expected_BT)


@pytest.mark.parametrize(("ratios", "advantage"), [([1.5, 2.0, 1.0], 2.0), ([2.0, 0.5, 1.0], 0.0)])
def test_kimi_penalises_log_ratio_of_trajectory(ratios: list[float], advantage: float) -> None:
    inputs = trajectory(ratios, [advantage] * 3)
    loss, log_ratio = kimi(inputs, tau=0.1).loss_BT.sum(), math.log(math.prod(ratios))
    assert loss.item() == pytest.approx(3 * advantage + 0.05 * log_ratio**2)
    assert gradient(loss, inputs).tolist() == [pytest.approx([-advantage + 0.1 * log_ratio] * 3)]


def test_sppo_is_the_square_of_an_answers_error() -> None:
    """log(1.5 · 2) against eta · ½; each action has half of the square, and the derivative of all of it."""
    inputs = trajectory([1.5, 2.0], [0.5, 0.5])
    loss_BT = sppo(inputs, eta=3.0).loss_BT
    error = math.log(3) - 1.5
    assert loss_BT.tolist() == [pytest.approx([error**2 / 2] * 2)]
    assert gradient(loss_BT.sum(), inputs).tolist() == [pytest.approx([2 * error] * 2)]


@pytest.mark.parametrize(
    ("value", "clip_range", "expected"),
    [
        (1.0, None, (0.5, -1.0, 0)), (0.1, 0.2, (0.5 * 1.9**2, -1.9, 0)), (1.0, 0.2, (0.5 * 1.8**2, 0.0, 1)),
        (-1.0, 0.2, (0.5 * 9, -3.0, 0)),  # moved the wrong way: not clipped
    ],
)  # fmt: skip
def test_loss_gradient_and_clip_of_one_value(
    value: float, clip_range: float | None, expected: tuple[float, float, float]
) -> None:
    values_BT = torch.tensor([[value]], requires_grad=True)
    terms = value_loss(values_BT, torch.zeros(1, 1), torch.full((1, 1), 2.0), clip_range=clip_range)
    (gradient_BT,) = torch.autograd.grad(terms.loss_BT.sum(), values_BT)
    assert (terms.loss_BT.item(), gradient_BT.item(), terms.clipped_BT.item()) == pytest.approx(expected)
