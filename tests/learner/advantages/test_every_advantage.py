"""What all advantages have in common."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.learner.algorithms.advantages.base import AdvantageInputs
from slipstream.learner.algorithms.registry import ADVANTAGES
from tests.learner.advantages.batches import SETTINGS, golden_batch, rows


def compute(name: str, inputs: AdvantageInputs) -> Tensor:
    return ADVANTAGES[name](inputs, **SETTINGS[name])


def as_dtype(inputs: AdvantageInputs, dtype: torch.dtype) -> AdvantageInputs:
    changed: dict[str, Any] = {
        name: value.to(dtype)
        for name, value in vars(inputs).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    return replace(inputs, **changed)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_rows_in_any_order_have_the_same_advantages(name: str) -> None:
    inputs = golden_batch()
    order = torch.randperm(len(inputs.group_B), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(compute(name, rows(inputs, order)), compute(name, inputs)[order])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_actions_that_are_none_have_no_advantage_whatever_stands_there(name: str) -> None:
    inputs = golden_batch()
    noise_BT = 1 - inputs.mask_BT
    assert inputs.values_BT is not None
    noisy = replace(inputs, rewards_BT=inputs.rewards_BT + noise_BT, values_BT=inputs.values_BT + noise_BT)
    advantages_BT = compute(name, noisy)
    assert advantages_BT[inputs.mask_BT == 0].abs().max() == 0
    torch.testing.assert_close(advantages_BT, compute(name, inputs))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_precision_is_that_of_the_inputs(name: str) -> None:
    double_BT, single_BT = compute(name, golden_batch()), compute(name, as_dtype(golden_batch(), torch.float32))
    assert (double_BT.dtype, single_BT.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(single_BT.double(), double_BT, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_finite_where_every_group_is_one_answer(name: str) -> None:
    one_each = replace(golden_batch(), group_B=torch.arange(24), groups=24)
    assert compute(name, one_each).isfinite().all()
