"""From a section of the configuration to a function: built-ins, plug-ins, and options that don't fit."""

import inspect
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.algorithms import (
    BUILT_IN_ADVANTAGES,
    AdvantageConfig,
    AdvantagePlugin,
    GrpoConfig,
    RlooConfig,
)
from slipstream.learner.algorithms.advantages.base import AdvantageInputs
from slipstream.learner.algorithms.advantages.group_relative import rloo
from slipstream.learner.algorithms.registry import (
    ADVANTAGES,
    NEEDS_COLLISION,
    build_advantage,
)
from tests.learner.advantages.batches import batch, golden_batch

HERE = "tests.learner.advantages.test_build"
NEEDS = {
    "terms_KB": {"gdpo"},
    "term_weights_K": {"gdpo"},
    "greedy_rewards_B": {"remax"},
    "values_BT": {"gae"},
    "logprobs_BT": NEEDS_COLLISION,
    "collision_BT": NEEDS_COLLISION,
}
A_NUMBER = 3


def scaled_mask(inputs: AdvantageInputs, *, scale: float) -> Tensor:
    """A plug-in."""
    return scale * inputs.mask_BT


def of_answers(inputs: AdvantageInputs) -> Tensor:
    return inputs.reward_B


def divided_by_nothing(inputs: AdvantageInputs) -> Tensor:
    return inputs.rewards_BT / 0.0


def section(name: str) -> Any:
    """The built-in's section, with its defaults."""
    return TypeAdapter(AdvantageConfig).validate_python(name)


def test_every_name_of_the_configuration_is_there() -> None:
    assert set(ADVANTAGES) == set(BUILT_IN_ADVANTAGES)
    assert len(get_args(get_args(AdvantageConfig)[0])) == len(ADVANTAGES) + 1


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_fields_of_the_section_are_the_arguments_of_the_function(name: str) -> None:
    inputs, *settings = inspect.signature(ADVANTAGES[name]).parameters.values()
    assert inputs.name == "inputs"
    assert [setting.name for setting in settings] == list(section(name).arguments)
    assert {setting.kind for setting in settings} <= {inspect.Parameter.KEYWORD_ONLY}
    assert {setting.default for setting in settings} <= {inspect.Parameter.empty}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_built_in_is_called_with_the_settings_of_its_section(name: str) -> None:
    inputs = golden_batch()
    ours_BT = build_advantage(section(name))(inputs)
    torch.testing.assert_close(ours_BT, ADVANTAGES[name](inputs, **section(name).arguments))


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("field", NEEDS)
def test_what_an_advantage_needs_is_stated(name: str, field: str) -> None:
    absent: dict[str, Any] = {field: None}
    without = replace(golden_batch(), **absent)
    if name in NEEDS[field]:
        with pytest.raises(AssertionError, match=field):
            ADVANTAGES[name](without, **section(name).arguments)
    else:
        assert ADVANTAGES[name](without, **section(name).arguments).isfinite().all()


def test_settings_that_differ_from_the_defaults_arrive() -> None:
    ours_BT = build_advantage(GrpoConfig(epsilon=1.0))(batch([[0.0, 2.0]]))
    torch.testing.assert_close(ours_BT[1, 0].item(), 1 / (2**0.5 + 1))


def test_advantages_have_no_gradient() -> None:
    inputs = batch([[0.0, 1.0]])
    inputs = replace(inputs, rewards_BT=inputs.rewards_BT.requires_grad_())
    assert rloo(inputs).requires_grad
    assert not build_advantage(RlooConfig(name="rloo"))(inputs).requires_grad


def test_a_plug_in_is_called_with_its_options() -> None:
    config = AdvantagePlugin(name=f"{HERE}:scaled_mask", options={"scale": 2.0})
    torch.testing.assert_close(build_advantage(config)(batch([[0.0]])).tolist(), [[2.0, 2.0]])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (f"{HERE}:scaled_mask", {"scael": 2.0}, r"can't be called with its options \(scael\): .*'scale'"),
        (f"{HERE}:scaled_mask", {}, r"can't be called with its options \(none\): missing .*'scale'"),
        (f"{HERE}:scaled_mask", {"scale": 1, "sharp": 2}, r"\(scale, sharp\): .*unexpected.*'sharp'"),
        (f"{HERE}:A_NUMBER", {}, "must be a function, not int"),
        (f"{HERE}:scaled_musk", {}, "has no 'scaled_musk'"),
        ("builtins:min", {}, "no signature found"),
    ],
    ids=["misspelt", "missing", "unknown", "no function", "no such plug-in", "no signature"],
)
def test_a_plug_in_that_does_not_fit_is_refused_by_name(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"advantage '{name}'.*{message}"):
        build_advantage(AdvantagePlugin(name=name, options=options))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{HERE}:of_answers", r"gave advantages of shape \[2\]; here it must be \[B, T\] = \[2, 2\]"),
        (f"{HERE}:divided_by_nothing", "gave advantages that are not finite"),
    ],
)
def test_a_plug_in_that_gives_no_advantage_for_each_action_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"advantage '{name}' {message}"):
        build_advantage(AdvantagePlugin(name=name))(batch([[0.0, 1.0]]))
