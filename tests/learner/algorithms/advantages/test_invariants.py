"""Properties of all advantages: order, mask, precision, ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.configs.schema.advantages import ADVANTAGES
from slipstream.learner.algorithms.advantages.base import AdvantageInputs, RewardTerms
from slipstream.learner.algorithms.advantages.groups import Groups
from tests.learner.algorithms.advantages.batches import ARGUMENTS, batch, golden_batch, rows
from tests.learner.algorithms.ranks import on_two_ranks

OVER_ALL_RANKS = ["gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg", "gae", "online_dpo"]
all_advantages = pytest.mark.parametrize("name", ADVANTAGES.built_in)


def compute(name: str, inputs: AdvantageInputs) -> Tensor:
    advantages_BT: Tensor = ADVANTAGES.load(name)(inputs, **ARGUMENTS[name])
    return advantages_BT


@all_advantages
def test_order_of_rows_does_not_matter(name: str) -> None:
    inputs = golden_batch()
    order = torch.randperm(len(inputs.groups.index_B), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(compute(name, rows(inputs, order)), compute(name, inputs)[order])


@all_advantages
def test_rank_without_episodes_of_an_env(name: str) -> None:
    inputs = golden_batch()
    none_BT = compute(name, inputs.of_rows(torch.zeros(len(inputs.mask_BT), dtype=torch.bool)))
    assert none_BT.shape == (0, inputs.mask_BT.shape[1])
    own_B = inputs.groups.index_B != 1
    torch.testing.assert_close(compute(name, inputs.of_rows(own_B)), compute(name, rows(inputs, own_B.nonzero()[:, 0])))


@all_advantages
def test_values_outside_mask_do_not_matter(name: str) -> None:
    inputs = golden_batch()
    noise_BT = 1 - inputs.mask_BT
    assert inputs.values_BT is not None
    noisy = replace(inputs, rewards_BT=inputs.rewards_BT + noise_BT, values_BT=inputs.values_BT + noise_BT)
    advantages_BT = compute(name, noisy)
    assert advantages_BT[inputs.mask_BT == 0].abs().max() == 0
    torch.testing.assert_close(advantages_BT, compute(name, inputs))


@all_advantages
def test_precision_is_that_of_inputs(name: str) -> None:
    inputs = golden_batch()
    assert inputs.terms is not None
    single: dict[str, Any] = {
        key: value.float()
        for key, value in vars(inputs).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    terms = RewardTerms(inputs.terms.values_KB.float(), inputs.terms.weights_K.float())
    double_BT, single_BT = compute(name, inputs), compute(name, replace(inputs, **single, terms=terms))
    assert (double_BT.dtype, single_BT.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(single_BT.double(), double_BT, rtol=0, atol=1e-5)


@all_advantages
def test_groups_of_one_episode_have_finite_advantages(name: str) -> None:
    one_each = replace(golden_batch(), groups=Groups(torch.arange(24), 24))
    assert compute(name, one_each).isfinite().all()


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "gae"])
def test_equal_large_rewards_have_no_advantage(name: str) -> None:
    """The mean in float32 would be off by more than such values may differ."""
    inputs = batch([[1000.1] * 512], lengths=[100] * 512, dtype=torch.float32)
    inputs = replace(inputs, values_BT=torch.zeros_like(inputs.mask_BT))
    undiscounted = {key: 1.0 for key in ARGUMENTS[name] if key != "length_adaptive"}
    ours_BT = ADVANTAGES.load(name)(inputs, **ARGUMENTS[name] | undiscounted)
    assert (ours_BT.dtype, ours_BT.abs().max().item()) == (torch.float32, 0.0)


def part(inputs: AdvantageInputs, groups: list[int], total: Callable[[Tensor], Tensor]) -> AdvantageInputs:
    """Some groups, numbered from 0."""
    chosen = rows(inputs, torch.isin(inputs.groups.index_B, torch.tensor(groups)).nonzero()[:, 0])
    numbers_B = torch.bucketize(chosen.groups.index_B, torch.tensor(groups))
    return replace(chosen, groups=Groups(numbers_B, len(groups)), total=total)


@all_advantages
def test_two_ranks_have_advantages_of_one(name: str) -> None:
    inputs = golden_batch()
    parts = [[0], [1, 2, 3]]  # the first has no spread, which GPG makes up for
    shares = on_two_ranks(lambda rank, total: compute(name, part(inputs, parts[rank], total)))
    torch.testing.assert_close(torch.cat(shares), compute(name, inputs))
    alone_BT = compute(name, part(inputs, parts[1], inputs.total))
    differs = bool((alone_BT - compute(name, inputs)[6:]).abs().max() > 1e-3)
    assert differs == (name in OVER_ALL_RANKS), "the other rank's groups count, or do not"
