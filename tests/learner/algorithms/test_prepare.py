"""What advantages are told of the answers of a step."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.configs import RunConfig
from slipstream.learner.algorithms.advantages.base import AdvantageInputs
from slipstream.learner.parallel.mesh import World
from tests.learner.recorded import build_trainer, preparer_of, recorded_step

MakeConfig = Callable[..., RunConfig]


def told(config: RunConfig, world: World, groups: Path) -> tuple[AdvantageInputs, Tensor]:
    """What an advantage is told of the first step, and where that has actions."""
    heard: list[AdvantageInputs] = []

    def advantage(inputs: AdvantageInputs) -> Tensor:
        heard.append(inputs)
        return torch.zeros_like(inputs.mask_BT)

    data = recorded_step(groups, 0, config, rank=0, world_size=1)
    prepare = preparer_of(build_trainer(config, world), advantage)
    prepare(data.rows, data.updates, consuming_version=0, unpublished_steps=0, kl_coefficient=0.0)
    (inputs,) = heard
    return inputs, data.rows.mask_BT > 0


@pytest.mark.parametrize("normalise", [False, True])
def test_an_advantage_gets_the_log_probs_of_all_actions_or_none(
    normalise: bool, world: World, make_config: MakeConfig, groups: Path
) -> None:
    """Zeros, which stand for those that nobody has worked out, would be a probability of 1."""
    correction = {"weight": "token", "cap": 2.0, "normalise": True} if normalise else {}
    inputs, actions_BT = told(make_config(updates_per_step=2, correction=correction), world, groups)
    assert (inputs.logprobs_BT is not None) == normalise
    assert inputs.logprobs_BT is None or (inputs.logprobs_BT[actions_BT] < 0).all()


def test_an_advantage_gets_the_weights_of_the_rewards_that_are_trained_on_and_of_no_others(
    world: World, make_config: MakeConfig, groups: Path
) -> None:
    rewards = [{"name": "digit_match", "weight": 0.0}, {"name": "exact_match", "weight": 0.5}]
    config = RunConfig.model_validate(make_config(advantage="gdpo").model_dump() | {"rewards": rewards})
    inputs, _ = told(config, world, groups)
    assert inputs.term_weights_K is not None and inputs.terms_KB is not None
    assert (inputs.term_weights_K.tolist(), len(inputs.terms_KB)) == ([0.5], 1)


def test_lag_counts_training_steps_of_versions(world: World, make_config: MakeConfig, groups: Path) -> None:
    base = make_config()
    config = base.model_copy(update={"weights": base.weights.model_copy(update={"publish_every_steps": 4})})
    data = recorded_step(groups, 1, config, rank=0, world_size=1)
    prepare = preparer_of(build_trainer(config, world))
    prepared = prepare(data.rows, data.updates, consuming_version=1, unpublished_steps=3, kl_coefficient=0.0)
    assert [set(prepared.lag_BT[data.rows.versions_BT == version].tolist()) for version in (0, 1)] == [{7}, {3}]
