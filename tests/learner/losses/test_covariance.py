"""Actions of high covariance are held back."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.learner.algorithms.losses.base import LossInputs
from slipstream.learner.algorithms.losses.clipped import ppo
from slipstream.learner.algorithms.losses.selective import clip_cov, kl_cov
from tests.learner.losses.examples import gradient, random_inputs

CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def covariances(inputs: LossInputs) -> Tensor:
    """Of the actions within the mask, in row order; NaN elsewhere."""
    within = inputs.mask_BT > 0
    logprobs, advantages = inputs.logprobs_BT.detach(), inputs.advantages_BT
    product = (logprobs - logprobs[within].mean()) * (advantages - advantages[within].mean())
    return product.masked_fill(~within, torch.nan)


def held_back(inputs: LossInputs, *, seed: int, ratio: float, low: float, high: float) -> Tensor:
    """Where clip_cov marks an action that PPO does not."""
    seeded = replace(inputs, generator=torch.Generator().manual_seed(seed))
    terms = clip_cov(seeded, **CLIP, ratio=ratio, cov_low=low, cov_high=high)
    return (terms.clipped_BT - ppo(inputs, **CLIP, dual_clip=None).clipped_BT) > 0


def test_clip_cov_stops_every_unclipped_action_in_the_band_if_the_share_allows_it() -> None:
    inputs = random_inputs()
    clipped_BT = ppo(inputs, **CLIP, dual_clip=None).clipped_BT > 0
    in_band_BT = (covariances(inputs) > 0.1) & (covariances(inputs) < 0.5)
    assert (in_band_BT & clipped_BT).any(), "the check would miss the actions that PPO clips"
    for beyond_BT in (covariances(inputs) <= 0.1, covariances(inputs) >= 0.5):
        assert (beyond_BT & ~clipped_BT).any(), "the check would miss a bound"
    found_BT = held_back(inputs, seed=0, ratio=1.0, low=0.1, high=0.5)
    assert torch.equal(found_BT, in_band_BT & ~clipped_BT)
    terms = clip_cov(inputs, **CLIP, ratio=1.0, cov_low=0.1, cov_high=0.5)
    assert not gradient(terms.loss_BT.sum(), inputs)[found_BT].any()
    assert not terms.loss_BT[found_BT].any()


@pytest.mark.parametrize(("ratio", "count"), [(0.1, 3), (1e-4, 1)])
def test_clip_cov_stops_a_share_of_the_actions_and_one_at_least(ratio: float, count: int) -> None:
    inputs = random_inputs()
    assert int(inputs.mask_BT.sum()) == 34
    assert held_back(inputs, seed=0, ratio=ratio, low=0.0, high=9.0).sum() == count


def test_clip_covs_choice_is_the_generators() -> None:
    inputs = random_inputs()
    first, again, other = (held_back(inputs, seed=seed, ratio=0.1, low=0.0, high=9.0) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_empty_band_leaves_ppo() -> None:
    inputs = random_inputs()
    terms = clip_cov(inputs, **CLIP, ratio=1.0, cov_low=90.0, cov_high=91.0)
    torch.testing.assert_close(terms.loss_BT, ppo(inputs, **CLIP, dual_clip=None).loss_BT)


def test_kl_cov_penalises_the_share_with_the_highest_covariance() -> None:
    inputs = random_inputs()
    plain, penalised = (kl_cov(inputs, ratio=0.1, coefficient=coefficient).loss_BT for coefficient in (0.0, 2.0))
    top = covariances(inputs).nan_to_num(-torch.inf).flatten().sort(descending=True).indices[:3]
    expected = torch.zeros(inputs.mask_BT.numel(), dtype=torch.float64)
    expected[top] = 2 * inputs.log_ratio_BT.detach().flatten()[top].abs()
    torch.testing.assert_close((penalised - plain).detach().flatten(), expected)
