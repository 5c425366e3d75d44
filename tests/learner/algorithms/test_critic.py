"""The critic in training steps: returns, clipping, pre-training, checkpoints."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from slipstream.configs import RunConfig
from slipstream.learner.checkpoint import TrainState, load_checkpoint, save_checkpoint
from slipstream.learner.parallel.fsdp import full_weights
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.rl.step import TrainStep
from tests.learner.recorded import build_train_step, recorded_step, train, weights_of

MakeConfig = Callable[..., RunConfig]
CRITIC = {"optimizer": {"lr": 3e-3, "warmup_steps": 0, "final_lr_fraction": 1.0}, "clip_range": None}


def critic_of(train_step: TrainStep) -> nn.Module:
    assert train_step.critic is not None, "the run has a critic"
    return train_step.critic.model


def moved(before: dict[str, Tensor], model: nn.Module) -> bool:
    return any(not torch.equal(tensor, before[name]) for name, tensor in full_weights(model))


def test_values_are_0_before_first_update(world: World, make_config: MakeConfig, groups: Path) -> None:
    config = make_config(advantage="gae", critic=CRITIC, updates_per_step=1)
    (figures,) = train(build_train_step(config, world), groups, [0])
    # Half the mean squared return: with λ = 1 the return of each action is the reward of its episode.
    assert figures["value_explained"] < 0
    assert figures["value_loss"] > 0.05


def test_returns_use_lambda_of_critic(world: World, make_config: MakeConfig, groups: Path) -> None:
    config = make_config(advantage="gae", critic=CRITIC | {"lam": 0.0}, updates_per_step=1)
    rows = recorded_step(groups, 0, config, rank=0, world_size=1).rows
    (figures,) = train(build_train_step(config, world), groups, [0])
    # Values are still 0, so with λ = 0 only an episode's last action has a return, the reward.
    at_the_end = 0.5 * rows.reward_E.square().sum() / rows.mask_BT.sum()
    assert figures["value_loss"] == pytest.approx(float(at_the_end), rel=1e-5)


def test_values_are_clipped_around_those_before_step(world: World, make_config: MakeConfig, groups: Path) -> None:
    clipped = []
    for updates in (1, 2):
        config = make_config(advantage="gae", critic=CRITIC | {"clip_range": 1e-4}, updates_per_step=updates)
        clipped.append(train(build_train_step(config, world), groups, [0])[0]["value_clip_fraction"])
    assert clipped[0] == 0
    assert 0.1 < clipped[1] < 0.6, "in the second update"


def test_critic_learns_repeated_rewards(world: World, make_config: MakeConfig, groups: Path) -> None:
    config = make_config(advantage="gae", critic=CRITIC)
    figures = train(build_train_step(config, world), groups, [0] * 12)
    assert figures[-1]["value_loss"] < 0.5 * figures[0]["value_loss"]
    assert figures[-1]["value_explained"] > figures[0]["value_explained"] + 0.5


def test_pre_training_changes_only_critic(world: World, make_config: MakeConfig, groups: Path) -> None:
    config = make_config(advantage="gae", critic=CRITIC | {"pretrain_steps": 2})
    train_step = build_train_step(config, world)
    policy, critic = weights_of(train_step.model), weights_of(critic_of(train_step))
    figures = train(train_step, groups, [0, 1])
    assert not moved(policy, train_step.model)
    assert moved(critic, critic_of(train_step))
    assert "loss" not in figures[0]
    train(train_step, groups, [2])
    assert moved(policy, train_step.model)


def test_policy_warm_up_follows_pre_training(
    world: World, make_config: MakeConfig, groups: Path, tmp_path: Path
) -> None:
    schedule = {"lr": 1.0, "warmup_steps": 2, "final_lr_fraction": 0.5}
    config = make_config(
        advantage="gae", critic=CRITIC | {"optimizer": schedule, "pretrain_steps": 2}, optimizer=schedule, steps=6
    )
    train_step, continued = (build_train_step(config, world) for _ in range(2))
    data = recorded_step(groups, 0, config, rank=0, world_size=1)
    figures = [train_step.run(data, unpublished_steps=0)]
    save_checkpoint(tmp_path / "saved", train_step.trained, TrainState(step=1), world, keep=1)
    load_checkpoint(tmp_path / "saved", continued.trained, world, TrainState)
    figures += [continued.run(replace(data, step=step), unpublished_steps=1) for step in range(1, 6)]
    assert [each.get("lr") for each in figures] == [None, None, 0.5, 1.0, 1.0, 0.75]
    assert [each["critic_lr"] for each in figures] == [0.5, 1.0, 1.0, 0.875, 0.75, 0.625]


def test_checkpoint_restores_critic_exactly(
    world: World, make_config: MakeConfig, groups: Path, tmp_path: Path
) -> None:
    config = make_config(advantage="gae", critic=CRITIC)
    train_step = build_train_step(config, world)
    train(train_step, groups, range(2))
    save_checkpoint(tmp_path / "saved", train_step.trained, TrainState(step=2), world, keep=1)
    wanted = train(train_step, groups, [2])
    restored = build_train_step(config, world)
    assert load_checkpoint(tmp_path / "saved", restored.trained, world, TrainState) == TrainState(step=2)
    assert train(restored, groups, [2]) == wanted
