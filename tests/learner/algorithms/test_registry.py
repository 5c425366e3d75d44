"""Advantages and losses by their configured names: built-ins, plug-ins, and options that don't fit."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.advantages import ADVANTAGES, AdvantageConfig
from slipstream.configs.schema.losses import LOSSES, LossConfig
from slipstream.learner.algorithms.advantages.base import AdvantageInputs
from slipstream.learner.algorithms.advantages.group_relative import rloo
from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms
from slipstream.learner.algorithms.losses.clipped import reinforce
from slipstream.learner.algorithms.registry import build_advantage, build_loss
from tests.learner.algorithms.advantages.batches import batch, golden_batch
from tests.learner.algorithms.losses.batches import random_inputs

NEEDS = {
    "terms": {"gdpo"},
    "greedy_rewards_B": {"remax"},
    "values_BT": {"gae"},
    "logprobs_BT": {"optimal_token_baseline", "online_dpo"},
    "reference_logprobs_BT": {"online_dpo"},
    "process_rewards_BT": {"prime"},
    "collision_BT": {"optimal_token_baseline"},
    "turn_BT": {"gigpo"},
    "state_BT": {"gigpo"},
    "agent_BT": {"rae_group"},
    "own_rewards_BT": {"rae_group"},
}
REGISTRIES = {registry.kind: registry for registry in (ADVANTAGES, LOSSES)}
BUILT_IN = [(kind, name) for kind, registry in REGISTRIES.items() for name in registry.built_in]
SECTIONS: dict[str, TypeAdapter[Any]] = {"advantage": TypeAdapter(AdvantageConfig), "loss": TypeAdapter(LossConfig)}
BUILDERS: dict[str, Any] = {"advantage": build_advantage, "loss": build_loss}
A_NUMBER = 3
HERE = "tests.learner.algorithms.test_registry"


def scaled_mask(inputs: AdvantageInputs, *, scale: float) -> Tensor:
    return scale * inputs.mask_BT


def per_episode(inputs: AdvantageInputs) -> Tensor:
    return inputs.reward_B


def infinite(inputs: AdvantageInputs) -> Tensor:
    return inputs.rewards_BT / 0.0


def scaled(inputs: LossInputs, *, scale: float, offset: float = 0.0) -> LossTerms:
    return LossTerms(scale * reinforce(inputs).loss_BT + offset, 0 * inputs.mask_BT)


def per_row(inputs: LossInputs) -> LossTerms:
    return LossTerms(reinforce(inputs).loss_BT.sum(-1), 0 * inputs.mask_BT)


def clipped_by_number(inputs: LossInputs) -> Any:
    return LossTerms(reinforce(inputs).loss_BT, 0.0)  # type: ignore[arg-type]  # as an untyped plug-in may


def a_tensor(inputs: LossInputs) -> Tensor:
    return reinforce(inputs).loss_BT


def without_gradient(inputs: LossInputs) -> LossTerms:
    return LossTerms(reinforce(inputs).loss_BT.detach(), 0 * inputs.mask_BT)


def section(kind: str, name: str, **settings: Any) -> Any:
    return SECTIONS[kind].validate_python({"name": name, **settings})


@pytest.mark.parametrize(("kind", "name"), BUILT_IN)
def test_section_fields_are_keyword_arguments(kind: str, name: str) -> None:
    _, *arguments = inspect.signature(REGISTRIES[kind].load(name)).parameters.values()
    required = [argument for argument in arguments if argument.default is argument.empty]
    assert {argument.name for argument in required} == set(section(kind, name).arguments)
    assert all(argument.kind is argument.KEYWORD_ONLY for argument in arguments)


@pytest.mark.parametrize("name", ADVANTAGES.built_in)
@pytest.mark.parametrize("field", NEEDS)
def test_missing_input_of_advantage_is_named(name: str, field: str) -> None:
    absent: dict[str, Any] = {field: None}
    advantage, without = build_advantage(section("advantage", name)), replace(golden_batch(), **absent)
    if name in NEEDS[field]:
        with pytest.raises(AssertionError, match=field):
            advantage(without)
    else:
        assert advantage(without).isfinite().all()


def test_settings_reach_function() -> None:
    leads = [
        build_advantage(section("advantage", "grpo_passk", divide_by_std=scaled))(batch([[0.0, 2.0]]))[1, 0].item()
        for scaled in (False, True)
    ]
    assert leads == pytest.approx([2.0, 2**0.5], rel=1e-5)
    narrow, wide = (
        build_loss(section("loss", "ppo", clip_low=clip, clip_high=clip))(random_inputs()).clipped_BT.sum()
        for clip in (0.1, 0.9)
    )
    assert narrow > wide


def test_advantages_have_no_gradient() -> None:
    inputs = batch([[0.0, 1.0]])
    inputs = replace(inputs, rewards_BT=inputs.rewards_BT.requires_grad_())
    assert rloo(inputs).requires_grad
    assert not build_advantage(section("advantage", "rloo"))(inputs).requires_grad


def test_plugins_get_their_options() -> None:
    advantage = build_advantage(section("advantage", f"{HERE}:scaled_mask", options={"scale": 2.0}))
    assert advantage(batch([[0.0]])).tolist() == [[2.0, 2.0]]
    inputs = random_inputs()
    found = build_loss(section("loss", f"{HERE}:scaled", options={"scale": 3.0}))(inputs)
    torch.testing.assert_close(found.loss_BT, 3 * reinforce(inputs).loss_BT)


@pytest.mark.parametrize(
    ("kind", "name", "options", "problem"),
    [
        ("advantage", f"{HERE}:scaled_mask", {"scael": 2.0}, r"\(scael\): .*'scale'"),
        ("advantage", f"{HERE}:scaled_mask", {}, "missing .*'scale'"),
        ("advantage", f"{HERE}:scaled_mask", {"scale": 1, "sharp": 2}, "unexpected.*'sharp'"),
        ("advantage", "builtins:min", {}, "signature"),
        ("loss", f"{HERE}:scaled", {}, "missing .*'scale'"),
        ("loss", f"{HERE}:A_NUMBER", {}, "not int"),
    ],
)
def test_plugin_that_cannot_be_called_is_refused(kind: str, name: str, options: dict[str, float], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"{kind} '{name}'.*{problem}"):
        BUILDERS[kind](section(kind, name, options=options))


@pytest.mark.parametrize(
    ("kind", "name", "problem"),
    [
        ("advantage", f"{HERE}:per_episode", r"\[2\].*\[2, 2\]"),
        ("advantage", f"{HERE}:infinite", "not finite"),
        ("loss", f"{HERE}:per_row", r"loss_BT .*\[8\].*\[8, 7\]"),
        ("loss", f"{HERE}:clipped_by_number", "clipped_BT .*float"),
        ("loss", f"{HERE}:a_tensor", "LossTerms.* Tensor"),
        ("loss", f"{HERE}:without_gradient", "gradient"),
    ],
)
def test_unusable_output_of_plugin_is_refused(kind: str, name: str, problem: str) -> None:
    inputs = batch([[0.0, 1.0]]) if kind == "advantage" else random_inputs()
    with pytest.raises(ConfigError, match=f"{kind} '{name}' .*{problem}"):
        BUILDERS[kind](section(kind, name))(inputs)
