"""What an update of the policy descends: which actions, anchors and penalties count in it."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from slipstream.configs import RunConfig
from slipstream.learner.algorithms.aggregation import totals_of
from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms
from slipstream.learner.algorithms.objective import Objective
from slipstream.learner.algorithms.registry import build_loss
from slipstream.learner.data.packing import MicroBatch
from slipstream.learner.models.scoring import ActionScores, score_actions
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.step import Trainer
from tests.learner.recorded import build_trainer, preparer_of, recorded_step, train

MakeConfig = Callable[..., RunConfig]


def objective_of(trainer: Trainer, groups: Path, *, update: int) -> tuple[Objective, MicroBatch, ActionScores]:
    """Of one update of the first step, which is a single micro-batch; without a penalty."""
    config = trainer.config
    data = recorded_step(groups, 0, config, rank=0, world_size=1)
    prepared = preparer_of(trainer)(
        data.rows, data.updates, consuming_version=0, unpublished_steps=0, kl_coefficient=0.0
    )
    (batch,) = data.updates[update]
    mask_BT = batch.of_step(data.rows.mask_BT if prepared.correction is None else prepared.correction.mask_BT)
    objective = Objective(
        learner=config.learner,
        horizon=config.rollout.sampling.max_tokens,
        loss=build_loss(config.learner.loss),
        prepared=prepared,
        update=update,
        totals=totals_of(mask_BT),
        kl_coefficient=0.0,
        generator=torch.Generator(),
    )
    return objective, batch, score_actions(trainer.model, batch, temperature=0.8)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_penalty_is_in_the_loss_only_where_it_is_not_in_the_reward(
    place: str, world: World, make_config: MakeConfig, groups: Path
) -> None:
    trainer = build_trainer(make_config(kl={"coefficient": 1.0, "place": place}, token_budget=4000), world)
    assert trainer.reference is not None
    nn.init.zeros_(trainer.reference.get_parameter("lm_head.weight"))  # so that policy and reference differ
    objective, batch, scores = objective_of(trainer, groups, update=0)
    without, penalised = (
        replace(objective, kl_coefficient=coefficient)(scores, batch).loss.item() for coefficient in (0.0, 1.0)
    )
    assert (penalised > without + 0.1) == (place == "loss")
    assert (penalised == without) == (place == "reward")


def test_what_is_rejected_does_not_count_in_the_ratio_of_its_answer(
    world: World, make_config: MakeConfig, groups: Path
) -> None:
    config = make_config(
        token_budget=4000,
        loss={"name": "gspo", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "token-mean"},
        correction={"weight": "none", "rejections": [{"level": "token", "estimator": "k1", "high": 1.5}]},
    )
    objective, batch, scores = objective_of(build_trainer(config, world), groups, update=1)
    moved_A = torch.randn(scores.logprobs_A.shape, generator=torch.Generator().manual_seed(0))
    outcome = objective(replace(scores, logprobs_A=scores.logprobs_A + moved_A), batch)
    anchor_BT, advantages_BT, mask_BT = map(
        batch.of_step,
        (objective.prepared.proximal_logprobs_BT, objective.prepared.advantages_BT, objective.prepared.rows.mask_BT),
    )
    kept_BT = mask_BT * ((anchor_BT - outcome.behaviour_BT).abs() <= math.log(1.5))
    assert torch.equal(outcome.kept_BT, kept_BT)
    assert 0 < kept_BT.sum() < mask_BT.sum()
    lengths_B1 = kept_BT.sum(-1, keepdim=True).clamp(min=1)
    ratio_B1 = (((outcome.target_BT - anchor_BT) * kept_BT).sum(-1, keepdim=True) / lengths_B1).exp()
    gain_BT = torch.minimum(ratio_B1 * advantages_BT, ratio_B1.clamp(0.8, 1.2) * advantages_BT)
    expected = -(gain_BT * kept_BT).sum() / kept_BT.sum()
    torch.testing.assert_close(outcome.loss.detach(), expected)


def test_what_is_rejected_has_no_entropy_bonus(world: World, make_config: MakeConfig, groups: Path) -> None:
    config = make_config(
        token_budget=4000,
        loss={"entropy_bonus": 0.5, "aggregation": "token-mean"},
        correction={"rejections": [{"level": "token", "estimator": "k1", "high": 1.5}]},
    )
    objective, batch, scores = objective_of(build_trainer(config, world), groups, update=0)
    entropy_A = torch.rand(scores.logprobs_A.shape, generator=torch.Generator().manual_seed(0))
    without, outcome = (objective(replace(scores, entropy_A=each_A), batch) for each_A in (None, entropy_A))
    kept_BT = outcome.kept_BT
    assert 0 < kept_BT.sum() < outcome.mask_BT.sum()
    bonus = 0.5 * (batch.padded(entropy_A) * kept_BT).sum() / kept_BT.sum()
    torch.testing.assert_close(outcome.loss, without.loss - bonus)


def test_a_loss_is_given_the_three_policies_apart(world: World, make_config: MakeConfig, groups: Path) -> None:
    objective, batch, scores = objective_of(build_trainer(make_config(token_budget=4000), world), groups, update=1)
    seen: list[LossInputs] = []

    def loss(inputs: LossInputs) -> LossTerms:
        seen.append(inputs)
        return objective.loss(inputs)

    replace(objective, loss=loss)(replace(scores, logprobs_A=scores.logprobs_A + 1), batch)
    (inputs,) = seen
    assert torch.equal(inputs.behaviour_logprobs_BT, batch.of_step(objective.prepared.rows.behaviour_logprobs_BT))
    assert torch.equal(inputs.proximal_logprobs_BT, batch.of_step(objective.prepared.proximal_logprobs_BT))
    torch.testing.assert_close(inputs.logprobs_BT - inputs.proximal_logprobs_BT, inputs.mask_BT)


@pytest.mark.parametrize(("proximal", "updates"), [("behaviour", [0]), ("recompute", [0, 1])])
def test_engine_mismatch_is_measured_only_where_the_steps_first_weights_are_known(
    proximal: str, updates: list[int], world: World, make_config: MakeConfig, groups: Path
) -> None:
    """The weights after the first update are other ones, and say nothing of the engine."""
    config = make_config(correction={"proximal": proximal}, optimizer={"lr": 2e-2, "warmup_steps": 0})
    data = recorded_step(groups, 0, config, rank=0, world_size=1)
    (figures,) = train(build_trainer(config, world), groups, [0])
    measured = sum(batch.actions for update in updates for batch in data.updates[update])
    assert (figures["mismatch_tokens"], figures["mismatch_tokens"] < figures["actions"]) == (measured, updates == [0])
