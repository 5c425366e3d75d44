"""Properties of all policy losses: gradients, mask, bounds, micro-batches.

# B rows (trajectories), T actions of the longest
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor

from slipstream.configs.schema.losses import LOSSES, LossConfig
from slipstream.learner.algorithms.aggregation import Totals, aggregate, totals_of
from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms
from slipstream.learner.algorithms.registry import build_loss
from tests.learner.algorithms.losses.batches import gradient, mapped, of_rows, random_inputs

SECTION: TypeAdapter[LossConfig] = TypeAdapter(LossConfig)
# Settings by which some of the random actions are clipped and some are not.
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"dual_clip": 1.5}, "decoupled_ppo": {"dual_clip": 1.5}, "gspo": {"clip_low": 0.1, "clip_high": 0.1},
    "ipo": {"epsilon": 0.1, "tau": 0.1}, "kpop": {"epsilon": 0.05, "tau": 0.1},
    "kl_cov": {"ratio": 0.3}, "clip_cov": {"ratio": 0.2, "cov_low": 0.0},
}  # fmt: skip
FROZEN_WEIGHT = {"cispo", "dppo_tv", "dppo_kl", "reinforce", "topr", "vespo", "asympo"}
MICRO_BATCH_MEANS = {"clip_cov", "kl_cov"}
"""Losses that compare an action with the others of its micro-batch."""


all_losses = pytest.mark.parametrize("name", LOSSES.built_in)


def section(name: str) -> LossConfig:
    return SECTION.validate_python({"name": name, **SETTINGS.get(name, {})})


def terms_of(name: str, inputs: LossInputs) -> LossTerms:
    seeded = replace(inputs, generator=torch.Generator().manual_seed(0))
    return build_loss(section(name))(seeded)


def figure(name: str, inputs: LossInputs, totals: Totals) -> Tensor:
    """A micro-batch's part of the loss, by the loss's own aggregation."""
    terms = terms_of(name, inputs)
    return aggregate(terms.loss_BT, inputs.mask_BT, section(name).aggregation, totals, horizon=10, constant=None)


@pytest.mark.parametrize("name", sorted(set(LOSSES.built_in) - FROZEN_WEIGHT))
def test_gradient_is_that_of_finite_differences(name: str) -> None:
    inputs = random_inputs()
    if name == "gspo":  # where a trajectory's actions have one advantage, the gradient of their sum
        inputs = replace(inputs, advantages_BT=inputs.advantages_BT[:, :1].expand_as(inputs.mask_BT))

    def loss(logprobs_BT: Tensor) -> Tensor:
        loss_BT = terms_of(name, replace(inputs, logprobs_BT=logprobs_BT)).loss_BT * inputs.mask_BT
        return loss_BT.sum(-1) if name == "gspo" else loss_BT

    assert torch.autograd.gradcheck(loss, inputs.logprobs_BT)


@pytest.mark.parametrize("name", sorted(FROZEN_WEIGHT))
def test_weight_of_log_prob_has_no_gradient(name: str) -> None:
    inputs = random_inputs()
    loss_BT = terms_of(name, inputs).loss_BT * inputs.mask_BT
    weight_BT = loss_BT.detach() / inputs.logprobs_BT.detach()
    torch.testing.assert_close(gradient(loss_BT.sum(), inputs), weight_BT)


POLICY_GRADIENT = ["ppo", "decoupled_ppo", "cispo", "gspo", "reinforce", "sapo", "dro", "topr", "vespo", "kimi"]


@pytest.mark.parametrize("name", [*POLICY_GRADIENT, "ipo", "kpop"])
def test_equal_policies_give_policy_gradient(name: str) -> None:
    inputs = random_inputs()
    own_BT = inputs.logprobs_BT.detach()
    inputs = replace(inputs, proximal_logprobs_BT=own_BT, behaviour_logprobs_BT=own_BT)
    terms = terms_of(name, inputs)
    gradient_BT = gradient((terms.loss_BT * inputs.mask_BT).sum(), inputs)
    torch.testing.assert_close(gradient_BT, -inputs.advantages_BT * inputs.mask_BT)
    assert not terms.clipped_BT.any()


@all_losses
@pytest.mark.parametrize("rows", [0, 2])
def test_micro_batch_without_actions_is_zero(name: str, rows: int) -> None:
    nothing_BT = torch.zeros(rows, 3)
    inputs = LossInputs(nothing_BT.clone().requires_grad_(), nothing_BT, nothing_BT, nothing_BT, nothing_BT)
    terms = terms_of(name, inputs)
    torch.testing.assert_close(terms.loss_BT.detach(), nothing_BT)
    torch.testing.assert_close(terms.clipped_BT, nothing_BT)
    torch.testing.assert_close(gradient(terms.loss_BT.sum(), inputs), nothing_BT)


@all_losses
@pytest.mark.parametrize("shift", [-1000.0, 1000.0])
def test_extreme_ratios_leave_loss_and_gradient_finite(name: str, shift: float) -> None:
    inputs = mapped(random_inputs(), lambda tensor: tensor.detach().float())
    inputs = replace(
        inputs,
        logprobs_BT=inputs.logprobs_BT.requires_grad_(),
        proximal_logprobs_BT=inputs.proximal_logprobs_BT + shift,
        behaviour_logprobs_BT=inputs.behaviour_logprobs_BT + shift,
    )
    loss = figure(name, inputs, totals_of(inputs.mask_BT))
    assert loss.isfinite()
    assert gradient(loss, inputs).isfinite().all()


@all_losses
def test_values_outside_mask_do_not_matter(name: str) -> None:
    def found(outside: float) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, gradient and marks where all tensors have this value outside the mask."""
        batch = mapped(inputs, lambda tensor: torch.where(within_BT, tensor.detach(), outside))
        batch = replace(batch, mask_BT=inputs.mask_BT, logprobs_BT=batch.logprobs_BT.requires_grad_())
        loss = figure(name, batch, totals_of(batch.mask_BT))
        return loss, gradient(loss, batch), terms_of(name, batch).clipped_BT

    inputs = random_inputs()
    within_BT = inputs.mask_BT > 0
    loss, *per_action = found(-0.7)
    torch.testing.assert_close((loss, *per_action), found(0.0))
    assert not any(each[~within_BT].any() for each in per_action)


@pytest.mark.parametrize("name", sorted(set(LOSSES.built_in) - MICRO_BATCH_MEANS))
@settings(max_examples=15)
@given(
    batch_of_row=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    padding=st.lists(st.integers(0, 2), min_size=4, max_size=4),
)
def test_split_into_micro_batches_does_not_matter(name: str, batch_of_row: list[int], padding: list[int]) -> None:
    inputs = random_inputs()
    totals = totals_of(inputs.mask_BT)
    whole = figure(name, inputs, totals)
    split = [[row for row in range(8) if batch_of_row[row] == batch] for batch in range(4)]
    parts = [figure(name, of_rows(inputs, rows, more), totals) for rows, more in zip(split, padding, strict=True)]
    together = torch.stack(parts).sum()
    torch.testing.assert_close(together, whole)
    torch.testing.assert_close(gradient(together, inputs), gradient(whole, inputs))
