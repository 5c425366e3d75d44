"""The policy's objective: the actions, anchors and penalties that count, on micro-batches and in whole steps."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.configs import RunConfig
from slipstream.learner.algorithms.aggregation import totals_of
from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms
from slipstream.learner.algorithms.objective import Objective
from slipstream.learner.algorithms.registry import Algorithm
from slipstream.learner.data.packing import MicroBatch
from slipstream.learner.models.fused_head import ActionScores
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.rl.step import TrainStep
from tests.learner.recorded import build_train_step, preparer_of, recorded_step, train

MakeConfig = Callable[..., RunConfig]
REJECTS_TOKENS = {"rejections": [{"level": "token", "estimator": "k1", "high": 1.5}]}


def objective_of(train_step: TrainStep, groups: Path, *, update: int) -> tuple[Objective, MicroBatch, ActionScores]:
    """The objective of one update of the first step, which is a single micro-batch; without a penalty."""
    data = recorded_step(groups, 0, train_step, rank=0, world_size=1)
    prepared = preparer_of(train_step)(
        data.rows, data.updates, consuming_version=0, unpublished_steps=0, kl_coefficient=0.0
    )
    (batch,) = data.updates[update]
    mask_BT = batch.of_step(data.rows.mask_BT if prepared.correction is None else prepared.correction.mask_BT)
    objective = Objective(
        algorithms=[Algorithm.of(train_step.learner)], horizon=train_step.sampling.max_tokens, prepared=prepared,
        update=update, totals=totals_of(mask_BT), tokens={}, kl_coefficient=0.0, generator=torch.Generator(),
    )  # fmt: skip
    return objective, batch, score_actions(train_step.model, batch, temperature=0.8)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_penalty_in_reward_is_not_in_loss(place: str, world: World, make_config: MakeConfig, groups: Path) -> None:
    train_step = build_train_step(make_config(kl={"coefficient": 1.0, "place": place}, token_budget=4000), world)
    assert train_step.reference is not None
    nn.init.zeros_(train_step.reference.get_parameter("lm_head.weight"))  # so that policy and reference differ
    objective, batch, scores = objective_of(train_step, groups, update=0)
    without, penalised = (
        replace(objective, kl_coefficient=coefficient)(scores, batch)[0].item() for coefficient in (0.0, 1.0)
    )
    assert (penalised > without + 0.1) == (place == "loss")
    assert (penalised == without) == (place == "reward")


def test_rejected_actions_are_not_in_sequence_ratio(world: World, make_config: MakeConfig, groups: Path) -> None:
    config = make_config(
        token_budget=4000,
        loss={"name": "gspo", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "token-mean"},
        correction={"weight": "none", **REJECTS_TOKENS},
    )
    objective, batch, scores = objective_of(build_train_step(config, world), groups, update=1)
    moved_A = torch.randn(scores.logprobs_A.shape, generator=torch.Generator().manual_seed(0))
    loss, figures = objective(scores._replace(logprobs_A=scores.logprobs_A + moved_A), batch)
    prepared = objective.prepared
    anchor_BT, advantages_BT, mask_BT = map(
        batch.of_step, (prepared.proximal_logprobs_BT, prepared.advantages_BT, prepared.rows.mask_BT)
    )
    kept_BT = mask_BT * ((anchor_BT - figures.behaviour_BT).abs() <= math.log(1.5))
    assert torch.equal(figures.kept_BT, kept_BT)
    assert 0 < kept_BT.sum() < mask_BT.sum()
    lengths_B1 = kept_BT.sum(-1, keepdim=True).clamp(min=1)
    ratio_B1 = (((figures.target_BT - anchor_BT) * kept_BT).sum(-1, keepdim=True) / lengths_B1).exp()
    gain_BT = torch.minimum(ratio_B1 * advantages_BT, ratio_B1.clamp(0.8, 1.2) * advantages_BT)
    torch.testing.assert_close(loss.detach(), -(gain_BT * kept_BT).sum() / kept_BT.sum())


def test_rejected_actions_have_no_entropy_bonus(world: World, make_config: MakeConfig, groups: Path) -> None:
    loss = {"entropy_bonus": 0.5, "aggregation": "token-mean"}
    config = make_config(token_budget=4000, loss=loss, correction=REJECTS_TOKENS)
    objective, batch, scores = objective_of(build_train_step(config, world), groups, update=0)
    entropy_A = torch.rand(scores.logprobs_A.shape, generator=torch.Generator().manual_seed(0))
    (without, _), (with_bonus, figures) = (
        objective(scores._replace(entropy_A=each_A), batch) for each_A in (None, entropy_A)
    )
    kept_BT = figures.kept_BT
    assert 0 < kept_BT.sum() < figures.mask_BT.sum()
    bonus = 0.5 * (batch.padded(entropy_A) * kept_BT).sum() / kept_BT.sum()
    torch.testing.assert_close(with_bonus, without - bonus)


def test_only_top_entropy_has_policy_loss(world: World, make_config: MakeConfig, groups: Path) -> None:
    config = make_config(token_budget=4000, loss={"top_entropy": 0.2, "aggregation": "token-mean"})
    objective, batch, scores = objective_of(build_train_step(config, world), groups, update=0)
    entropy_A = torch.rand(scores.logprobs_A.shape, generator=torch.Generator().manual_seed(0))
    loss, figures = objective(scores._replace(entropy_A=entropy_A), batch)
    (gradient_A,) = torch.autograd.grad(loss, scores.logprobs_A)
    allowed_A = entropy_A >= entropy_A.sort(descending=True).values[int(0.2 * figures.mask_BT.sum()) - 1]
    assert gradient_A[allowed_A].any()
    assert not gradient_A[~allowed_A].any()


def test_groups_count_by_their_importance_weights(world: World, make_config: MakeConfig, groups: Path) -> None:
    objective, batch, scores = objective_of(build_train_step(make_config(token_budget=4000), world), groups, update=0)
    rows = objective.prepared.rows
    first_B = (rows.group_E[rows.episode_B] == 0).float()

    def loss(weights_B: torch.Tensor) -> torch.Tensor:
        prepared = replace(objective.prepared, rows=replace(rows, importance_weights_B=weights_B))
        return replace(objective, prepared=prepared)(scores, batch)[0]

    one, three = loss(first_B), loss(1 + 2 * first_B)
    assert one != 0
    torch.testing.assert_close(three, loss(torch.ones_like(first_B)) + 2 * one)


def test_loss_gets_three_policies_apart(world: World, make_config: MakeConfig, groups: Path) -> None:
    objective, batch, scores = objective_of(build_train_step(make_config(token_budget=4000), world), groups, update=1)
    seen: list[LossInputs] = []

    def loss(inputs: LossInputs) -> LossTerms:
        seen.append(inputs)
        return algorithm.loss(inputs)

    (algorithm,) = objective.algorithms
    replace(objective, algorithms=[replace(algorithm, loss=loss)])(
        scores._replace(logprobs_A=scores.logprobs_A + 1), batch
    )
    (inputs,) = seen
    assert torch.equal(inputs.behaviour_logprobs_BT, batch.of_step(objective.prepared.rows.behaviour_logprobs_BT))
    assert torch.equal(inputs.proximal_logprobs_BT, batch.of_step(objective.prepared.proximal_logprobs_BT))
    torch.testing.assert_close(inputs.logprobs_BT - inputs.proximal_logprobs_BT, inputs.mask_BT)


# --- whole steps -----------------------------------------------------------------------------------------------------

CORRECTIONS: list[dict[str, Any]] = [
    {"proximal": "behaviour"}, {"proximal": "interpolate"}, {"weight": "sequence"}, {"weight": "none"},
    {"band": [0.5, 2.0]}, {"normalise": True},
]  # fmt: skip
REJECTING: list[dict[str, Any]] = [
    {"rejections": [{"level": "sequence_mean", "estimator": "k3", "high": 0.5}]}, REJECTS_TOKENS,
    {"second_moment": 0.04}, {"veto": 1e-3},
    {"rejections": [{"level": "sequence_mean", "estimator": "k1", "low": 0.9, "only_bad": True}]},
]  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        *[{"correction": correction} for correction in CORRECTIONS + REJECTING],
        *[
            {
                "loss": {"aggregation": mode, "entropy_bonus": 0.01, "constant": 64.0 if mode == "constant" else None},
                "kl": {"coefficient": 0.1},
            }
            for mode in ("seq-mean-token-mean", "constant")
        ],
        {"kl": {"coefficient": 0.1, "estimator": "k3*"}},
        {"advantage": "gae", "critic": {"optimizer": {"lr": 3e-3, "warmup_steps": 0}, "clip_range": None}},
    ],
    ids=str,
)
def test_token_budget_does_not_matter(
    settings: dict[str, Any], world: World, make_config: MakeConfig, groups: Path
) -> None:
    one, other = (
        train(build_train_step(make_config(token_budget=budget, **settings), world), groups, [0])
        for budget in (40, 4000)
    )
    assert one[0]["grad_norm"] > 0
    for mine, theirs in zip(one, other, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4, rel=1e-3)


@pytest.mark.parametrize("correction", REJECTING, ids=str)
def test_rejected_actions_are_counted_by_reason(
    correction: dict[str, Any], world: World, make_config: MakeConfig, groups: Path
) -> None:
    (figures,) = train(build_train_step(make_config(correction=correction), world), groups, [0])
    assert 0 < figures["masked_fraction"] < 1
    (by_reason,) = [value for name, value in figures.items() if name.startswith("masked/")]
    assert by_reason == pytest.approx(figures["masked_fraction"])


def test_step_with_everything_rejected_has_loss_0(world: World, make_config: MakeConfig, groups: Path) -> None:
    correction = {"rejections": [{"level": "token", "estimator": "k3", "high": 1e-12}]}
    (figures,) = train(build_train_step(make_config(correction=correction), world), groups, [0])
    assert (figures["masked_fraction"], figures["loss"], figures["grad_norm"]) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(("proximal", "updates"), [("behaviour", [0]), ("recompute", [0, 1])])
def test_mismatch_is_measured_where_first_weights_are_known(
    proximal: str, updates: list[int], world: World, make_config: MakeConfig, groups: Path
) -> None:
    config = make_config(correction={"proximal": proximal}, optimizer={"lr": 2e-2, "warmup_steps": 0})
    data = recorded_step(groups, 0, config, rank=0, world_size=1)
    (figures,) = train(build_train_step(config, world), groups, [0])
    measured = sum(batch.actions for update in updates for batch in data.updates[update])
    assert (figures["mismatch_tokens"], figures["mismatch_tokens"] < figures["actions"]) == (measured, updates == [0])
