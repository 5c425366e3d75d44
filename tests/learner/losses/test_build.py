"""Losses by name, and a user's own."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.algorithms import BUILT_IN_LOSSES
from slipstream.learner.algorithms.losses.clipped import reinforce
from slipstream.learner.algorithms.registry import LOSSES, build_loss
from tests.learner.losses.examples import random_inputs, section

PLUGINS = """
from slipstream.learner.algorithms.losses.base import LossTerms

def scaled(inputs, *, scale, offset=0.0):
    return LossTerms(-scale * inputs.advantages_BT * inputs.logprobs_BT + offset, 0 * inputs.mask_BT)

def of_answers(inputs):
    return LossTerms((inputs.advantages_BT * inputs.logprobs_BT).sum(-1), 0 * inputs.mask_BT)

def marked_by_number(inputs):
    return LossTerms(-inputs.advantages_BT * inputs.logprobs_BT, 0.0)

def a_tensor(inputs):
    return -inputs.advantages_BT * inputs.logprobs_BT

def of_the_past(inputs):
    return LossTerms(-inputs.advantages_BT * inputs.behaviour_logprobs_BT, 0 * inputs.mask_BT)

number = 3
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's own, and an entry point to it."""
    (tmp_path / "my_losses.py").write_text(PLUGINS)
    metadata = tmp_path / "mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[slipstream.losses]\nscaled = my_losses:scaled\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)


def test_every_name_of_the_configuration_has_its_loss() -> None:
    assert tuple(LOSSES) == BUILT_IN_LOSSES


def test_decoupled_ppo_is_ppo_whose_behaviour_weight_comes_afterwards() -> None:
    assert LOSSES["decoupled_ppo"] is LOSSES["ppo"]


def test_a_built_in_is_bound_to_its_sections_arguments() -> None:
    inputs = random_inputs()
    narrow, wide = (
        build_loss(section("ppo", clip_low=clip, clip_high=clip))(inputs).clipped_BT.sum() for clip in (0.1, 0.9)
    )
    assert narrow > wide


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("name", ["my_losses:scaled", "scaled"])
def test_a_plug_in_gets_its_options(name: str) -> None:
    inputs = random_inputs()
    found = build_loss(section(name, options={"scale": 3.0}))(inputs)
    torch.testing.assert_close(found.loss_BT, 3 * reinforce(inputs).loss_BT)


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("my_losses:scaled", {}, "missing a required argument: 'scale'"),
        ("my_losses:scaled", {"scale": 1, "scle": 2}, "got an unexpected keyword argument 'scle'"),
        ("my_losses:number", {}, "must be a function, not int"),
        ("my_losses:none", {}, "module 'my_losses' has no 'none'"),
    ],
)
def test_a_plug_in_that_cannot_be_called_with_its_options_is_refused(
    name: str, options: dict[str, float], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as refusal:
        build_loss(section(name, options=options))
    assert name in str(refusal.value)


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("my_losses:of_answers", r"gave loss_BT of shape \[\d+\]; here it must be \[B, T\] = \[\d+, \d+\]"),
        ("my_losses:marked_by_number", "gave clipped_BT as float, not as a tensor"),
        ("my_losses:a_tensor", "must return LossTerms, not Tensor"),
        ("my_losses:of_the_past", "gave loss_BT without a gradient"),
    ],
)
def test_a_plug_in_whose_terms_would_train_something_else_is_named(name: str, problem: str) -> None:
    inputs = random_inputs()
    inputs = replace(inputs, logprobs_BT=inputs.logprobs_BT.detach().requires_grad_())
    with pytest.raises(ConfigError, match=f"loss '{name}' {problem}"):
        build_loss(section(name))(inputs)
