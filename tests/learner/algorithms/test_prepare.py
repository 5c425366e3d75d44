"""Preparation of a step: inputs of advantages, ages of actions, and the reference model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from slipstream.configs import RunConfig
from slipstream.learner.algorithms.advantages.base import AdvantageInputs
from slipstream.learner.algorithms.prepare import PreparedStep, StepPreparer
from slipstream.learner.data.buffer_feed import StepData
from slipstream.learner.parallel.fsdp import full_weights
from slipstream.learner.parallel.mesh import World
from tests.learner.recorded import build_train_step, preparer_of, recorded_step, train

MakeConfig = Callable[..., RunConfig]


def prepared(
    prepare: StepPreparer, data: StepData, *, unpublished_steps: int = 0, kl_coefficient: float = 0.0
) -> PreparedStep:
    return prepare(
        data.rows, data.updates, consuming_version=data.consuming_version, unpublished_steps=unpublished_steps,
        kl_coefficient=kl_coefficient,
    )  # fmt: skip


def advantage_inputs(config: RunConfig, world: World, groups: Path) -> tuple[AdvantageInputs, Tensor]:
    """Inputs of the advantage of the first step, and its mask."""
    received: list[AdvantageInputs] = []

    def advantage(inputs: AdvantageInputs) -> Tensor:
        received.append(inputs)
        return torch.zeros_like(inputs.mask_BT)

    data = recorded_step(groups, 0, config, rank=0, world_size=1)
    prepared(preparer_of(build_train_step(config, world), advantage), data)
    (inputs,) = received
    return inputs, data.rows.mask_BT > 0


@pytest.mark.parametrize("normalise", [False, True])
def test_advantage_gets_log_probs_of_all_actions_or_none(
    normalise: bool, world: World, make_config: MakeConfig, groups: Path
) -> None:
    """A log-prob of 0, which stands where none was computed, is a probability of 1."""
    correction = {"weight": "token", "cap": 2.0, "normalise": True} if normalise else {}
    inputs, actions_BT = advantage_inputs(make_config(updates_per_step=2, correction=correction), world, groups)
    assert (inputs.logprobs_BT is not None) == normalise
    assert inputs.logprobs_BT is None or (inputs.logprobs_BT[actions_BT] < 0).all()


def test_advantage_gets_terms_with_weight(world: World, make_config: MakeConfig, groups: Path) -> None:
    rewards = [{"name": "digit_match", "weight": 0.0}, {"name": "exact_match", "weight": 0.5}]
    config = RunConfig.model_validate(make_config(advantage="gdpo").model_dump() | {"rewards": rewards})
    inputs, _ = advantage_inputs(config, world, groups)
    assert inputs.terms is not None
    assert (inputs.terms.weights_K.tolist(), len(inputs.terms.values_KB)) == ([0.5], 1)


def test_lag_counts_training_steps_of_versions(world: World, make_config: MakeConfig, groups: Path) -> None:
    base = make_config()
    config = base.model_copy(update={"weights": base.weights.model_copy(update={"publish_every_steps": 4})})
    data = recorded_step(groups, 1, config, rank=0, world_size=1)
    lag_BT = prepared(preparer_of(build_train_step(config, world)), data, unpublished_steps=3).lag_BT
    assert [set(lag_BT[data.rows.versions_BT == version].tolist()) for version in (0, 1)] == [{7}, {3}]


# --- reference model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_reference_stays_initial_policy(place: str, world: World, make_config: MakeConfig, groups: Path) -> None:
    config = make_config(kl={"coefficient": 0.1, "place": place}, updates_per_step=1)
    train_step = build_train_step(config, world)
    assert train_step.reference is not None
    before = {name: tensor.clone() for name, tensor in full_weights(train_step.reference)}
    first, second, *_ = train(train_step, groups, range(3))
    assert first["reference_kl"] == pytest.approx(0, abs=1e-6)
    assert second["reference_kl"] > 1e-4
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_weights(train_step.reference))


def test_scored_reference_is_sharded_again(world: World, make_config: MakeConfig, groups: Path) -> None:
    base = make_config(kl={"coefficient": 0.1}, updates_per_step=1)
    config = base.model_copy(update={"model": base.model.model_copy(update={"dtype": "bfloat16"})})
    train_step = build_train_step(config, world)
    train(train_step, groups, range(1))
    assert train_step.reference is not None
    # FSDP leaves what is in no layer gathered for a backward pass, which a reference never has.
    assert all(isinstance(weight, DTensor) for weight in train_step.reference.parameters())


@pytest.mark.parametrize("proximal", ["recompute", "behaviour", "interpolate"])
def test_penalty_in_reward_lowers_advantages(
    proximal: str, world: World, make_config: MakeConfig, groups: Path
) -> None:
    kl = {"coefficient": 1.0, "place": "reward", "estimator": "k1"}
    config = make_config(kl=kl, advantage="dr_grpo", correction={"proximal": proximal})
    train_step = build_train_step(config, world)
    train(train_step, groups, range(2))  # so that policy and reference differ
    data = recorded_step(groups, 2, config, rank=0, world_size=1)
    without, penalised = (
        prepared(preparer_of(train_step), data, kl_coefficient=coefficient) for coefficient in (0.0, 0.5)
    )
    assert penalised.reference_logprobs_BT is not None
    assert (penalised.proximal_logprobs_BT[data.rows.mask_BT > 0] < 0).all(), "some were not scored"
    divergence_B = (penalised.proximal_logprobs_BT - penalised.reference_logprobs_BT).sum(-1)
    assert divergence_B.abs().max() > 0.1
    by_group = divergence_B.reshape(data.rows.groups, -1)
    expected_B = -0.5 * (by_group - by_group.mean(1, keepdim=True)).flatten()
    change_BT = penalised.advantages_BT - without.advantages_BT
    torch.testing.assert_close(change_BT, expected_B[:, None] * data.rows.mask_BT, atol=1e-4, rtol=1e-4)


def test_adaptive_coefficient_rises_above_target(world: World, make_config: MakeConfig, groups: Path) -> None:
    kl: dict[str, Any] = {"coefficient": 0.01, "target": 1e-5, "horizon": 64}  # in episodes, of which a step has 32
    figures = train(build_train_step(make_config(kl=kl), world), groups, range(4))
    coefficients = [each["kl_coefficient"] for each in figures]
    assert coefficients[0] == 0.01
    assert coefficients[1:] == pytest.approx([coefficients[1], 1.1 * coefficients[1], 1.1**2 * coefficients[1]])
