"""Advantages as the reference implementation has them, and what all of them have in common."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.learner.advantages.base import AdvantageInputs
from slipstream.learner.advantages.build import BUILT_IN
from slipstream.learner.advantages.gae import value_returns
from tests.learner.advantages.batches import GOLDEN, SETTINGS, golden_batch, rows

GAE = {"gae_gamma1.0_lambda1.0": (1.0, 1.0), "gae_gamma0.99_lambda0.95": (0.99, 0.95)}


def settings_of(vector: str) -> tuple[str, dict[str, Any]]:
    """The built-in that a reference vector is of, and its settings."""
    if vector in GAE:
        gamma, lam = GAE[vector]
        return "gae", {"gamma": gamma, "lam": lam, "length_adaptive": None}
    different: dict[str, dict[str, Any]] = {"reinforce_plus_plus": {"gamma": 1.0}, "gpg": {"scale_up_for": "no_reward"}}
    return vector, different.get(vector, SETTINGS[vector])


def compute(name: str, inputs: AdvantageInputs) -> Tensor:
    return BUILT_IN[name](inputs, **SETTINGS[name])


def as_dtype(inputs: AdvantageInputs, dtype: torch.dtype) -> AdvantageInputs:
    changed: dict[str, Any] = {
        name: value.to(dtype)
        for name, value in vars(inputs).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    return replace(inputs, **changed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("vector", GOLDEN["advantages"])
def test_advantages_are_those_of_the_reference_implementation(vector: str, dtype: torch.dtype) -> None:
    name, settings = settings_of(vector)
    expected_BT = torch.tensor(GOLDEN["advantages"][vector]["out"], dtype=dtype)
    ours_BT = BUILT_IN[name](as_dtype(golden_batch(), dtype), **settings)
    torch.testing.assert_close(ours_BT, expected_BT, rtol=0, atol=1e-5)


@pytest.mark.parametrize("vector", GAE)
def test_returns_are_those_of_the_reference_implementation(vector: str) -> None:
    gamma, lam = GAE[vector]
    expected_BT = torch.tensor(GOLDEN["advantages"][vector]["returns"], dtype=torch.float64)
    ours_BT = value_returns(golden_batch(), gamma=gamma, lam=lam)
    torch.testing.assert_close(ours_BT, expected_BT, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", BUILT_IN)
def test_rows_in_any_order_have_the_same_advantages(name: str) -> None:
    inputs = golden_batch()
    order = torch.randperm(len(inputs.group_B), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(compute(name, rows(inputs, order)), compute(name, inputs)[order])


@pytest.mark.parametrize("name", BUILT_IN)
def test_actions_that_are_none_have_no_advantage_whatever_stands_there(name: str) -> None:
    inputs = golden_batch()
    noise_BT = 1 - inputs.mask_BT
    assert inputs.values_BT is not None
    noisy = replace(inputs, rewards_BT=inputs.rewards_BT + noise_BT, values_BT=inputs.values_BT + noise_BT)
    advantages_BT = compute(name, noisy)
    assert advantages_BT[inputs.mask_BT == 0].abs().max() == 0
    torch.testing.assert_close(advantages_BT, compute(name, inputs))


@pytest.mark.parametrize("name", BUILT_IN)
def test_precision_is_that_of_the_inputs(name: str) -> None:
    assert compute(name, golden_batch()).dtype == torch.float64
    assert compute(name, as_dtype(golden_batch(), torch.float32)).dtype == torch.float32


@pytest.mark.parametrize("name", BUILT_IN)
def test_advantages_are_finite_where_every_group_is_one_answer(name: str) -> None:
    one_each = replace(golden_batch(), group_B=torch.arange(24), groups=24)
    assert compute(name, one_each).isfinite().all()
