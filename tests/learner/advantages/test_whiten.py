"""Mean 0 and variance 1 over a step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from slipstream.learner.algorithms.advantages.base import AdvantageInputs, alone
from slipstream.learner.algorithms.advantages.groups import whiten
from slipstream.learner.algorithms.advantages.returns import gae, reinforce_plus_plus
from tests.learner.advantages.batches import batch, matrix


def test_white_values_have_mean_0_and_variance_1_under_the_mask() -> None:
    # 1, 3, 5: mean 3, variance 4; the 100 is masked.
    ours_BT = whiten(matrix([1, 3], [5, 100]), matrix([1, 1], [1, 0]), alone)
    torch.testing.assert_close(ours_BT, matrix([-1, 0], [1, 0]))


@pytest.mark.parametrize("values_BT", [matrix([7]), matrix([7, 7])], ids=["one value", "equal values"])
def test_values_without_spread_whiten_to_nothing(values_BT: Tensor) -> None:
    assert whiten(values_BT, torch.ones_like(values_BT), alone).abs().max() == 0


@pytest.mark.parametrize(
    "advantage",
    [partial(reinforce_plus_plus, gamma=1.0), partial(gae, gamma=1.0, lam=1.0, length_adaptive=None)],
    ids=["reinforce_plus_plus", "gae"],
)
def test_many_large_rewards_that_are_all_equal_are_no_advantage(
    advantage: Callable[[AdvantageInputs], Tensor],
) -> None:
    """The mean in float32 would be off by more than such values may differ."""
    inputs = batch([[1000.1] * 512], lengths=[100] * 512, dtype=torch.float32)
    ours_BT = advantage(replace(inputs, values_BT=torch.zeros_like(inputs.mask_BT)))
    assert (ours_BT.dtype, ours_BT.abs().max().item()) == (torch.float32, 0.0)
