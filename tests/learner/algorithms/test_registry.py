"""Advantages and losses by their configured names: built-ins, plug-ins, and options that don't fit."""

import inspect
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import TypeAdapter

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.algorithms import (
    BUILT_IN_ADVANTAGES,
    BUILT_IN_LOSSES,
    AdvantageConfig,
    GrpoConfig,
    LossConfig,
)
from slipstream.learner.algorithms.advantages.group_relative import rloo
from slipstream.learner.algorithms.losses.clipped import reinforce
from slipstream.learner.algorithms.registry import ADVANTAGES, LOSSES, NEEDS_COLLISION, build_advantage, build_loss
from tests.learner.algorithms.advantages.batches import batch, golden_batch
from tests.learner.algorithms.losses.batches import random_inputs

NEEDS = {
    "terms": {"gdpo"},
    "greedy_rewards_B": {"remax"},
    "values_BT": {"gae"},
    "logprobs_BT": NEEDS_COLLISION,
    "collision_BT": NEEDS_COLLISION,
}
BUILT_IN = [*[("advantage", name) for name in ADVANTAGES], *[("loss", name) for name in LOSSES]]
SECTIONS: dict[str, TypeAdapter[Any]] = {"advantage": TypeAdapter(AdvantageConfig), "loss": TypeAdapter(LossConfig)}
FUNCTIONS: dict[str, Mapping[str, Any]] = {"advantage": ADVANTAGES, "loss": LOSSES}
BUILDERS: dict[str, Any] = {"advantage": build_advantage, "loss": build_loss}
PLUGINS = """
from slipstream.learner.algorithms.losses.base import LossTerms

def scaled_mask(inputs, *, scale):
    return scale * inputs.mask_BT

def per_episode(inputs):
    return inputs.reward_B

def infinite(inputs):
    return inputs.rewards_BT / 0.0

def scaled(inputs, *, scale, offset=0.0):
    return LossTerms(-scale * inputs.advantages_BT * inputs.logprobs_BT + offset, 0 * inputs.mask_BT)

def per_row(inputs):
    return LossTerms((inputs.advantages_BT * inputs.logprobs_BT).sum(-1), 0 * inputs.mask_BT)

def clipped_by_number(inputs):
    return LossTerms(-inputs.advantages_BT * inputs.logprobs_BT, 0.0)

def a_tensor(inputs):
    return -inputs.advantages_BT * inputs.logprobs_BT

def without_gradient(inputs):
    return LossTerms(-inputs.advantages_BT * inputs.behaviour_logprobs_BT, 0 * inputs.mask_BT)

number = 3
"""


def section(kind: str, name: str, **settings: Any) -> Any:
    return SECTIONS[kind].validate_python({"name": name, **settings})


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user, with an entry point."""
    (tmp_path / "plugins.py").write_text(PLUGINS)
    metadata = tmp_path / "mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[slipstream.losses]\nscaled = plugins:scaled\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "plugins", raising=False)


def test_each_configured_name_has_its_function() -> None:
    assert set(ADVANTAGES) == set(BUILT_IN_ADVANTAGES)
    assert tuple(LOSSES) == BUILT_IN_LOSSES
    for config, functions in ((AdvantageConfig, ADVANTAGES), (LossConfig, LOSSES)):
        assert len(get_args(get_args(config)[0])) == len(functions) + 1
    assert LOSSES["decoupled_ppo"] is LOSSES["ppo"]


@pytest.mark.parametrize(("kind", "name"), BUILT_IN)
def test_section_fields_are_keyword_arguments(kind: str, name: str) -> None:
    _, *arguments = inspect.signature(FUNCTIONS[kind][name]).parameters.values()
    assert {argument.name for argument in arguments} == set(section(kind, name).arguments)
    assert all(argument.kind is argument.KEYWORD_ONLY for argument in arguments)
    assert all(argument.default is argument.empty for argument in arguments)


@pytest.mark.parametrize("name", ADVANTAGES)
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
    advantages_BT = build_advantage(GrpoConfig(epsilon=1.0))(batch([[0.0, 2.0]]))
    assert advantages_BT[1, 0].item() == pytest.approx(1 / (2**0.5 + 1))
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


@pytest.mark.usefixtures("plugins")
def test_plugins_get_their_options() -> None:
    advantage = build_advantage(section("advantage", "plugins:scaled_mask", options={"scale": 2.0}))
    assert advantage(batch([[0.0]])).tolist() == [[2.0, 2.0]]
    inputs = random_inputs()
    for name in ("plugins:scaled", "scaled"):
        found = build_loss(section("loss", name, options={"scale": 3.0}))(inputs)
        torch.testing.assert_close(found.loss_BT, 3 * reinforce(inputs).loss_BT)


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("kind", "name", "options", "problem"),
    [
        ("advantage", "plugins:scaled_mask", {"scael": 2.0}, r"\(scael\): .*'scale'"),
        ("advantage", "plugins:scaled_mask", {}, "missing .*'scale'"),
        ("advantage", "plugins:scaled_mask", {"scale": 1, "sharp": 2}, "unexpected.*'sharp'"),
        ("advantage", "builtins:min", {}, "signature"),
        ("loss", "plugins:scaled", {}, "missing .*'scale'"),
        ("loss", "plugins:number", {}, "not int"),
    ],
)
def test_plugin_that_cannot_be_called_is_refused(kind: str, name: str, options: dict[str, float], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"{kind} '{name}'.*{problem}"):
        BUILDERS[kind](section(kind, name, options=options))


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("kind", "name", "problem"),
    [
        ("advantage", "plugins:per_episode", r"\[2\].*\[2, 2\]"),
        ("advantage", "plugins:infinite", "not finite"),
        ("loss", "plugins:per_row", r"loss_BT .*\[8\].*\[8, 7\]"),
        ("loss", "plugins:clipped_by_number", "clipped_BT .*float"),
        ("loss", "plugins:a_tensor", "LossTerms, not Tensor"),
        ("loss", "plugins:without_gradient", "gradient"),
    ],
)
def test_unusable_output_of_plugin_is_refused(kind: str, name: str, problem: str) -> None:
    inputs = batch([[0.0, 1.0]]) if kind == "advantage" else random_inputs()
    with pytest.raises(ConfigError, match=f"{kind} '{name}' .*{problem}"):
        BUILDERS[kind](section(kind, name))(inputs)
