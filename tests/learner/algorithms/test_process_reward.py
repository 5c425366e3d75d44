"""The implicit process reward model in training steps: scores, cross-entropy, its own optimizer, checkpoints."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from slipstream.configs import RunConfig
from slipstream.learner.algorithms.process_reward import ProcessRewardModel, cross_entropy
from slipstream.learner.checkpoint import TrainState, load_checkpoint, save_checkpoint
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.fsdp import full_weights
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.rl.step import TrainStep
from tests.learner.recorded import build_train_step, recorded_step, train, weights_of

MakeConfig = Callable[..., RunConfig]
OPTIMIZER = {"lr": 3e-3, "warmup_steps": 0, "final_lr_fraction": 1.0}
PRIME = {"advantage": "prime", "process_reward": {"beta": 0.5, "optimizer": OPTIMIZER}}


def model_of(train_step: TrainStep) -> ProcessRewardModel:
    assert train_step.process_reward is not None, "the run has a process reward model"
    return train_step.process_reward


def test_cross_entropy_and_its_gradient_by_hand() -> None:
    """p = ¼: -log ¼, -log ¾ and half of each; outcomes beyond 0..1 are limited; the gradient is p - o."""
    reward_B = torch.full((5,), -math.log(3), dtype=torch.float64, requires_grad=True)
    outcome_B = torch.tensor([1.0, 0.0, 0.5, 7.0, -1.0]).double()
    loss_B = cross_entropy(reward_B, outcome_B)
    right, wrong = math.log(4), math.log(4 / 3)
    assert loss_B.tolist() == pytest.approx([right, wrong, (right + wrong) / 2, right, wrong])
    (gradient_B,) = torch.autograd.grad(loss_B.sum(), reward_B)
    assert gradient_B.tolist() == pytest.approx([-0.75, 0.25, -0.25, -0.75, 0.25])
    assert torch.autograd.gradcheck(lambda values_B: cross_entropy(values_B, outcome_B), reward_B)


def test_rewards_are_0_before_first_update(world: World, make_config: MakeConfig, groups: Path) -> None:
    config = make_config(**PRIME, updates_per_step=1)
    (figures,) = train(build_train_step(config, world), groups, [0])
    assert figures["process_reward_loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert figures["process_reward"] == pytest.approx(0, abs=1e-6)
    assert figures["process_reward_grad_norm"] > 0
    rloo = make_config(advantage="rloo", updates_per_step=1)
    (without,) = train(build_train_step(rloo, world), groups, [0])
    assert figures["grad_norm"] == pytest.approx(without["grad_norm"], rel=1e-4)


def test_scores_are_log_ratios_to_the_initial_weights(world: World, make_config: MakeConfig, groups: Path) -> None:
    config = make_config(**PRIME)
    train_step = build_train_step(config, world)
    initial = weights_of(train_step.model)
    train(train_step, groups, [0, 1])
    process = model_of(train_step)
    for name, tensor in full_weights(process.reference):
        torch.testing.assert_close(tensor, initial[name], rtol=0, atol=0)
    batch = recorded_step(groups, 2, config, rank=0, world_size=1).updates[0][0]
    rewards_A, reference_A = process.score(batch)
    with torch.no_grad():
        own_A, first_A = (logprobs(model, batch) for model in (process.model, process.reference))
    torch.testing.assert_close(rewards_A, 0.5 * (own_A - first_A))
    torch.testing.assert_close(reference_A, first_A)
    assert rewards_A.abs().max() > 0.01
    assert not rewards_A.requires_grad
    only_actions = torch.stack([torch.arange(batch.actions), batch.actions_S])
    cut = process.score(replace(batch, kept_2K=only_actions))
    torch.testing.assert_close(cut, (rewards_A, reference_A), msg="top-k is of the policy alone")


def logprobs(model: nn.Module, batch: object) -> torch.Tensor:
    return score_actions(model, batch, temperature=1.0).logprobs_A  # type: ignore[arg-type]


def test_model_learns_repeated_outcomes(world: World, make_config: MakeConfig, groups: Path) -> None:
    figures = train(build_train_step(make_config(**PRIME), world), groups, [0] * 12)
    assert figures[-1]["process_reward_loss"] < 0.8 * figures[0]["process_reward_loss"]
    assert figures[-1]["process_reward_accuracy"] > max(0.75, figures[0]["process_reward_accuracy"])


def test_checkpoint_restores_model_exactly(world: World, make_config: MakeConfig, groups: Path, tmp_path: Path) -> None:
    config = make_config(**PRIME)
    train_step = build_train_step(config, world)
    train(train_step, groups, range(2))
    save_checkpoint(tmp_path / "saved", train_step.trained, TrainState(step=2), world, keep=1)
    wanted = train(train_step, groups, [2])
    restored = build_train_step(config, world)
    assert load_checkpoint(tmp_path / "saved", restored.trained, world, TrainState) == TrainState(step=2)
    assert train(restored, groups, [2]) == wanted
