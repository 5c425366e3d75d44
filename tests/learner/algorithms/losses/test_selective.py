"""Losses by hand that exclude or penalise single actions, by a divergence or by a covariance."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms
from slipstream.learner.algorithms.losses.clipped import ppo
from slipstream.learner.algorithms.losses.selective import clip_cov, dppo_kl, dppo_tv, ipo, kl_cov, kpop, top_entropy
from tests.learner.algorithms.losses.batches import gradient, random_inputs, trajectory

CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def weight(
    loss: Callable[..., LossTerms], proximal: float, target: float, advantage: float, *, clip: float
) -> tuple[float, float]:
    """Factor of the policy gradient of an action with these probabilities, and `clipped`; clip_high is twice `clip`."""
    inputs = trajectory([target / proximal], [advantage], logprob=math.log(target))
    terms = loss(inputs, clip_low=clip, clip_high=2 * clip, cap=20.0)
    return -gradient(terms.loss_BT.sum(), inputs).item() / advantage, terms.clipped_BT.item()


@pytest.mark.parametrize(
    ("loss", "clip", "proximal", "target", "advantage", "expected"),
    [
        (dppo_tv, 0.1, 0.5, 0.65, 1.0, (1.3, 0)),  # 0.15 up
        (dppo_tv, 0.1, 0.5, 0.75, 1.0, (0.0, 1)),  # 0.25 up
        (dppo_tv, 0.1, 0.5, 0.75, -1.0, (1.5, 0)), (dppo_tv, 0.1, 0.5, 0.45, -1.0, (0.9, 0)),
        (dppo_tv, 0.1, 0.5, 0.35, -1.0, (0.0, 1)),  # 0.15 down
        (dppo_tv, 0.1, 0.5, 0.35, 1.0, (0.7, 0)), (dppo_tv, 0.1, 0.01, 0.05, 1.0, (5.0, 0)),
        (dppo_tv, 0.1, 0.001, 0.1, 1.0, (20.0, 1)),  # the cap
        # Certain actions have a divergence too.
        (dppo_kl, 0.05, 1.0, 1.0, -1.0, (1.0, 0)), (dppo_kl, 0.05, 1.0, 0.98, -1.0, (0.98, 0)),
        (dppo_kl, 0.05, 1.0, 0.9, -1.0, (0.0, 1)), (dppo_kl, 0.05, 0.9, 1.0, 1.0, (0.0, 1)),
    ],
)  # fmt: skip
def test_action_loses_gradient_out_of_region(
    loss: Callable[..., LossTerms],
    clip: float,
    proximal: float,
    target: float,
    advantage: float,
    expected: tuple[float, float],
) -> None:
    assert weight(loss, proximal, target, advantage, clip=clip) == pytest.approx(expected)


@pytest.mark.parametrize(("proximal", "target"), [(0.5, 0.75), (0.2, 0.1), (0.97, 0.9), (0.01, 0.03)])
@pytest.mark.parametrize("share", [0.99, 1.01])
def test_dppo_kl_bounds_binary_kl(proximal: float, target: float, share: float) -> None:
    kl = proximal * math.log(proximal / target) + (1 - proximal) * math.log((1 - proximal) / (1 - target))
    away = 1.0 if target > proximal else -1.0
    bound = kl * share / (2 if away > 0 else 1)
    expected = (target / proximal, 0) if share > 1 else (0.0, 1)
    assert weight(dppo_kl, proximal, target, away, clip=bound) == pytest.approx(expected)
    assert weight(dppo_kl, proximal, target, -away, clip=bound) == pytest.approx((target / proximal, 0))


# KL(0.5‖0.8) = ½ log(0.25/0.16), KL(0.8‖0.5) = 0.8 log 1.6 + 0.2 log 0.4.
FORWARD, BACKWARD = 0.5 * math.log(0.25 / 0.16), 0.8 * math.log(1.6) + 0.2 * math.log(0.4)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize(
    ("loss", "epsilon", "proximal", "target", "kept"),
    [
        (ipo, 0.3, 0.5, 0.79, True), (ipo, 0.3, 0.5, 0.81, False), (ipo, 0.3, 0.5, 0.21, True),
        (ipo, 0.3, 0.5, 0.19, False),
        (ipo, 0.3, 1e-4, 0.1, True),  # a ratio of 1,000
        (kpop, max(FORWARD, BACKWARD) * 1.01, 0.5, 0.8, True), (kpop, max(FORWARD, BACKWARD) * 0.99, 0.5, 0.8, False),
        (kpop, max(FORWARD, BACKWARD) * 1.01, 0.8, 0.5, True), (kpop, max(FORWARD, BACKWARD) * 0.99, 0.8, 0.5, False),
        (kpop, 0.1, 1.0, 1.0, True), (kpop, 0.1, 1.0, 0.9, False), (kpop, 0.1, 1e-3, 2e-2, True),
    ],
)  # fmt: skip
def test_action_out_of_region_has_no_gradient(
    loss: Callable[..., LossTerms], epsilon: float, proximal: float, target: float, kept: bool, advantage: float
) -> None:
    ratio = target / proximal
    for tau in (0.0, 0.5):
        inputs = trajectory([ratio], [advantage], logprob=math.log(target))
        terms = loss(inputs, epsilon=epsilon, tau=tau)
        assert terms.clipped_BT.item() == 1 - kept
        policy = -ratio * advantage * kept
        assert terms.loss_BT.item() == pytest.approx(policy + tau * math.log(ratio) ** 2)
        expected = policy + 2 * tau * math.log(ratio)  # the pull towards π_prox is everywhere
        assert gradient(terms.loss_BT.sum(), inputs).item() == pytest.approx(expected)


def covariances(inputs: LossInputs) -> Tensor:
    """Covariances of the actions within the mask; NaN elsewhere."""
    within = inputs.mask_BT > 0
    logprobs, advantages = inputs.logprobs_BT.detach(), inputs.advantages_BT
    product = (logprobs - logprobs[within].mean()) * (advantages - advantages[within].mean())
    return product.masked_fill(~within, torch.nan)


def chosen(inputs: LossInputs, *, seed: int, ratio: float, low: float, high: float) -> Tensor:
    """Marks of the actions that clip_cov selects beside those that PPO clips."""
    seeded = replace(inputs, generator=torch.Generator().manual_seed(seed))
    terms = clip_cov(seeded, **CLIP, ratio=ratio, cov_low=low, cov_high=high)
    return (terms.clipped_BT - ppo(inputs, **CLIP, dual_clip=None).clipped_BT) > 0


def test_clip_cov_selects_from_unclipped_actions_in_band() -> None:
    inputs = random_inputs()
    clipped_BT = ppo(inputs, **CLIP, dual_clip=None).clipped_BT > 0
    in_band_BT = (covariances(inputs) > 0.1) & (covariances(inputs) < 0.5)
    assert (in_band_BT & clipped_BT).any(), "the check would miss the actions that PPO clips"
    for beyond_BT in (covariances(inputs) <= 0.1, covariances(inputs) >= 0.5):
        assert (beyond_BT & ~clipped_BT).any(), "the check would miss a bound"
    found_BT = chosen(inputs, seed=0, ratio=1.0, low=0.1, high=0.5)
    assert torch.equal(found_BT, in_band_BT & ~clipped_BT)
    terms = clip_cov(inputs, **CLIP, ratio=1.0, cov_low=0.1, cov_high=0.5)
    assert not gradient(terms.loss_BT.sum(), inputs)[found_BT].any()
    assert not terms.loss_BT[found_BT].any()


@pytest.mark.parametrize(("ratio", "low", "count"), [(0.1, 0.0, 3), (1e-4, 0.0, 1), (1.0, 90.0, 0)])
def test_clip_cov_selects_share_of_actions_at_random(ratio: float, low: float, count: int) -> None:
    inputs = random_inputs()
    assert int(inputs.mask_BT.sum()) == 34
    first, again, other = (chosen(inputs, seed=seed, ratio=ratio, low=low, high=low + 9) for seed in (0, 0, 1))
    assert first.sum() == count
    assert torch.equal(first, again)
    assert torch.equal(first, other) == (count == 0)


def test_kl_cov_penalises_highest_covariances() -> None:
    inputs = random_inputs()
    plain, penalised = (kl_cov(inputs, ratio=0.1, coefficient=coefficient).loss_BT for coefficient in (0.0, 2.0))
    top = covariances(inputs).nan_to_num(-torch.inf).flatten().sort(descending=True).indices[:3]
    expected = torch.zeros(inputs.mask_BT.numel(), dtype=torch.float64)
    expected[top] = 2 * inputs.log_ratio_BT.detach().flatten()[top].abs()
    torch.testing.assert_close((penalised - plain).detach().flatten(), expected)


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.1, [[0, 0, 1], [0, 0, 0]]), (0.4, [[0, 1, 1], [0, 0, 0]]), (0.6, [[1, 1, 1], [1, 0, 0]])],  # of 5 actions
)
def test_top_entropy_marks_share_and_ties_within_mask(share: float, expected: list[list[float]]) -> None:
    entropy_BT = torch.tensor([[1.0, 2.0, 3.0], [1.0, 0.5, 9.0]])
    mask_BT = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    assert top_entropy(entropy_BT, mask_BT, share).tolist() == expected
    assert not top_entropy(entropy_BT, 0 * mask_BT, share).any()
