"""A training step on recorded groups: what it changes, what it anchors to, and that ranks don't matter."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from slipstream.buffer.wire.messages import Group
from slipstream.configs import RunConfig
from slipstream.learner.data.buffer_feed import StepData, build_step, partition_groups, token_sequence
from slipstream.learner.data.packing import MicroBatch, pack
from slipstream.learner.data.rows import ActionBatch
from slipstream.learner.metrics.action_trace import ActionTrace
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.fsdp import full_weights
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.rl.step import TrainStep
from tests.learner.recorded import (
    RECORDED_STEPS,
    build_train_step,
    record,
    recorded_step,
    step_groups,
    train,
    weights_of,
)
from tests.learner.recorded import trajectory as recorded_trajectory

MakeConfig = Callable[..., RunConfig]

OBJECTIVES: list[tuple[dict[str, Any], str]] = [
    *(
        ({"loss": {"name": name, "aggregation": "token-mean"}, "correction": {"proximal": "behaviour"}}, "loss")
        for name in ("ppo", "gmpo", "dro", "kimi")
    ),
    ({"loss": {"name": "ppo", "entropy_bonus": 1.0}}, "loss"),
    ({"kl": {"coefficient": 1.0, "estimator": "abs"}}, "loss"),
    ({"advantage": "gae", "critic": {"optimizer": {"lr": 1e-3}}}, "value_loss"),
]
"""Losses that are linear in the advantage and such that are not, and what is added to them."""


def groups_folder(config: RunConfig) -> Path:
    """The frames of the recorded steps."""
    folder = config.run.dir / "groups"
    record(folder, RECORDED_STEPS, config)
    return folder


def plain_copy(train_step: TrainStep, config: RunConfig) -> nn.Module:
    """The same weights in a model that nothing shards."""
    from transformers import AutoModelForCausalLM

    assert config.model.path is not None, "recorded runs have a model folder"
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=torch.float32, attn_implementation="segments"
    )
    model.load_state_dict(weights_of(train_step.model))
    return model


@pytest.mark.parametrize("updates", [1, 2])
def test_step_changes_every_weight(world: World, make_config: MakeConfig, updates: int) -> None:
    config = make_config(updates_per_step=updates)
    train_step = build_train_step(config, world)
    before = weights_of(train_step.model)
    (figures,) = train(train_step, groups_folder(config), [0])
    for name, after in full_weights(train_step.model):
        assert torch.isfinite(after).all(), name
        assert not torch.equal(after, before[name]), name
    assert figures["lr"] == pytest.approx(3e-3)
    assert figures["grad_norm"] > 0


def test_learning_rate_follows_sample_size_of_each_update(world: World, make_config: MakeConfig) -> None:
    config = make_config(correction={"reference_ess": 1.0}, updates_per_step=2)
    folder = groups_folder(config)
    first, second = train(build_train_step(config, world), folder, [0, 1])
    assert 0 < first["lr"] < 3e-3
    assert 0 < second["lr"] < 3e-3
    split = build_train_step(make_config(correction={"reference_ess": 1.0}, updates_per_step=2, token_budget=40), world)
    (again,) = train(split, folder, [0])
    assert again["lr"] == pytest.approx(first["lr"], rel=1e-3)


def test_update_without_finite_gradient_is_skipped(world: World, make_config: MakeConfig) -> None:
    config = make_config()
    train_step = build_train_step(config, world)
    data = recorded_step(groups_folder(config), 0, config, rank=0, world_size=1)
    data.rows.behaviour_logprobs_BT[-16:, 0] = torch.nan  # in the second of two updates
    before = weights_of(train_step.model)
    figures = train_step.run(data, unpublished_steps=0)
    assert figures["skipped_updates"] == 1
    assert not math.isfinite(figures["grad_norm"])
    assert {int(state["step"]) for state in train_step.optimizer.state.values()} == {1}
    for name, after in full_weights(train_step.model):
        assert torch.isfinite(after).all(), name
        assert not torch.equal(after, before[name]), name


@pytest.mark.parametrize("proximal", ["recompute", "behaviour"])
def test_traced_values_are_those_of_the_loss(world: World, make_config: MakeConfig, proximal: str) -> None:
    rejections = [{"level": "token", "estimator": "k1", "high": 1.5}] if proximal == "recompute" else []
    # So that both updates see the initial weights.
    config = make_config(correction={"proximal": proximal, "rejections": rejections}, optimizer={"lr": 1e-12})
    train_step = build_train_step(config, world)
    data = recorded_step(groups_folder(config), 0, config, rank=0, world_size=1)
    rows, model = data.rows, plain_copy(train_step, config)
    traced = ActionTrace({row: data.trajectories[row] for row in (0, 5, 30)})
    figures = train_step.run(data, unpublished_steps=0, traced=traced)
    columns, kept = traced.columns(), 0.0
    assert columns.keys() == {0, 5, 30}
    target_BT = torch.zeros_like(rows.mask_BT)
    for batch in (batch for batches in data.updates for batch in batches):
        batch.put(target_BT, score_actions(model, batch, temperature=0.8).logprobs_A.detach())
    ratio_BT, advantages_BT = (target_BT - rows.behaviour_logprobs_BT).exp(), advantages_of(rows)
    for row, found in columns.items():
        actions = int(rows.mask_BT[row].sum())
        ratio, advantage, trained, entropy = (
            np.frombuffer(column, dtype="<f4")
            for column in (found.ratio, found.advantage, found.trained, found.entropy)
        )
        np.testing.assert_allclose(ratio, ratio_BT[row, :actions], rtol=1e-4)
        np.testing.assert_allclose(advantage, advantages_BT[row, :actions], rtol=1e-4, atol=1e-6)
        outside = (ratio > 1.5) | (ratio < 1 / 1.5)
        np.testing.assert_array_equal(trained, ~outside if proximal == "recompute" else np.ones(actions))
        assert (entropy > 0).all()
        kept += trained.sum()
    assert kept > 0
    assert figures["masked_fraction"] > 0 or proximal == "behaviour"


def test_trace_of_a_failed_step_has_no_ratios() -> None:
    answer = recorded_trajectory(np.random.default_rng(0), tokens=4)
    updates = [pack([token_sequence(answer, {})], token_budget=10)]
    traced = ActionTrace({0: answer})
    assert traced.columns() == {}
    traced.prepared(updates, torch.tensor([[0.5, 0.25, 0.125, 0.0]]))
    found = traced.columns()[0]
    np.testing.assert_array_equal(np.frombuffer(found.advantage, dtype="<f4"), [0.5, 0.25, 0.125])
    assert np.isnan(np.frombuffer(found.ratio, dtype="<f4")).all()
    assert not np.frombuffer(found.trained, dtype="<f4").any()


def own_loss(model: nn.Module, batches: list[MicroBatch], data: StepData, anchors: list[Tensor]) -> tuple[Tensor, int]:
    """The mean decoupled loss over an update's actions, and how many of them were clipped."""
    actions = sum(batch.actions for batch in batches)
    total, clipped = torch.zeros(()), 0
    for batch, anchor in zip(batches, anchors, strict=True):
        target = score_actions(model, batch, temperature=0.8).logprobs_A
        behaviour = in_order(batch, data.rows.behaviour_logprobs_BT)
        advantages = in_order(batch, advantages_of(data.rows))
        ratio = (target - anchor).exp()
        gain, clipped_gain = ratio * advantages, ratio.clamp(0.8, 1.2) * advantages
        weight = (anchor - behaviour).exp().clamp(max=2.0)
        total = total - (weight * torch.minimum(gain, clipped_gain)).sum() / actions
        clipped += int((clipped_gain < gain).sum())
    return total, clipped


def in_order(batch: MicroBatch, values_BT: Tensor) -> Tensor:
    """The values of a tensor over the step's rows at the batch's actions."""
    return values_BT[batch.rows_B[batch.sequence_A], batch.action_index_A]


def advantages_of(rows: ActionBatch) -> Tensor:
    """Group-relative advantages of every action."""
    advantages = torch.zeros_like(rows.reward_E)
    for group in range(rows.groups):
        mine = rows.group_E == group
        rewards = rows.reward_E[mine]
        advantages[mine] = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return advantages[:, None] * rows.mask_BT


def test_second_update_is_anchored_to_initial_weights(world: World, make_config: MakeConfig) -> None:
    config = make_config(optimizer={"lr": 2e-2, "warmup_steps": 0})
    train_step = build_train_step(config, world)
    folder = groups_folder(config)
    data = recorded_step(folder, 0, config, rank=0, world_size=1)
    first, second = data.updates
    by_hand = plain_copy(train_step, config)
    anchor = copy.deepcopy(by_hand)

    def scored(model: nn.Module, batches: list[MicroBatch]) -> list[Tensor]:
        with torch.no_grad():
            return [score_actions(model, batch, temperature=0.8).logprobs_A for batch in batches]

    first_loss, first_clipped = own_loss(by_hand, first, data, scored(anchor, first))
    first_loss.backward()
    nn.utils.clip_grad_norm_(by_hand.parameters(), config.learner.optimizer.clip_norm)
    torch.optim.AdamW(by_hand.parameters(), lr=2e-2, betas=(0.9, 0.99), weight_decay=0.0).step()
    second_loss, second_clipped = own_loss(by_hand, second, data, scored(anchor, second))
    # What the trap leads to: an anchor that is scored anew with the present weights, whose ratio is always 1.
    trapped_loss, trapped_clipped = own_loss(by_hand, second, data, scored(by_hand, second))

    (figures,) = train(train_step, folder, [0])
    first_value, second_value, trapped_value = (
        float(loss.detach()) for loss in (first_loss, second_loss, trapped_loss)
    )
    assert first_clipped == trapped_clipped == 0
    assert second_clipped > 0
    assert figures["clip_fraction"] * figures["actions"] == pytest.approx(second_clipped, abs=2)
    assert figures["loss"] == pytest.approx((first_value + second_value) / 2, abs=1e-3)
    assert abs(second_value - trapped_value) > 0.05


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("updates", [1, 2, 4])
def test_groups_are_dealt_once_in_updates_fixed_by_order(world_size: int, updates: int) -> None:
    shares = [partition_groups(16, updates=updates, rank=rank, world_size=world_size) for rank in range(world_size)]
    per_update = 16 // updates
    for update in range(updates):
        assigned = [index for share in shares for index in share[update]]
        assert sorted(assigned) == list(range(update * per_update, (update + 1) * per_update))
        assert {len(share[update]) for share in shares} == {per_update // world_size}


def test_step_holds_rows_of_its_updates_in_order(make_config: MakeConfig) -> None:
    config = make_config()
    groups = step_groups(0, config)[:3]
    data = build_step(
        [[(groups[0], 1.0)], [(groups[1], 0.5), (groups[2], 1.0)]], algorithms=config.algorithms,
        rewards=config.rewards, step=0, consuming_version=3,
    )  # fmt: skip
    assert (data.step, data.consuming_version, len(data.trajectories)) == (0, 3, 12)
    assert data.rows.group_E.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data.rows.importance_weights_B.tolist() == [1.0] * 4 + [0.5] * 4 + [1.0] * 4
    assert data.rows.reward_E.tolist() == pytest.approx([t.reward for g in groups for t in g.trajectories])
    of_update = [sorted(row for batch in batches for row in batch.rows_B.tolist()) for batches in data.updates]
    assert of_update == [list(range(4)), list(range(4, 12))]


@pytest.mark.parametrize(("settings", "figure"), OBJECTIVES, ids=str)
def test_group_with_half_weight_has_half_the_loss(
    settings: dict[str, Any], figure: str, world: World, make_config: MakeConfig
) -> None:
    config = make_config(updates_per_step=1, **settings)
    one, other = step_groups(0, config)[:2]

    def summed(*groups: tuple[Group, float]) -> float:
        data = build_step([groups], algorithms=config.algorithms, rewards=config.rewards, step=0, consuming_version=0)
        train_step = build_train_step(config, world)
        if train_step.reference is not None:  # so that policy and reference differ
            nn.init.zeros_(train_step.reference.get_parameter("lm_head.weight"))
        figures = train_step.run(data, unpublished_steps=0)
        return figures[figure] * figures["actions"]

    assert summed((other, 1.0)) != pytest.approx(0, abs=0.1)
    assert summed((one, 1.0), (other, 0.5)) == pytest.approx(summed((one, 1.0)) + 0.5 * summed((other, 1.0)), rel=1e-4)
