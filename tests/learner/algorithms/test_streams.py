"""Streams beside the policy loss, and algorithms of single envs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import token_ids
from slipstream.configs import RunConfig
from slipstream.learner.algorithms.aggregation import totals_of
from slipstream.learner.algorithms.objective import Objective
from slipstream.learner.algorithms.registry import Algorithm
from slipstream.learner.algorithms.streams import cross_entropy, distillation, stream_mean
from slipstream.learner.data.buffer_feed import StepData, build_step, observed_tokens
from slipstream.learner.data.packing import all_actions, pack
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.rl.step import TrainStep
from tests.learner.recorded import (
    build_train_step,
    in_turns,
    mixed_config,
    mixed_groups,
    preparer_of,
    step_groups,
    weights_of,
)

MakeConfig = Callable[..., RunConfig]
CE = {"streams": {"ce": 0.05}}


def test_losses_of_streams_by_hand() -> None:
    logprobs_BT = torch.tensor([[0.5, 0.25, 0.1], [0.2, 1.0, 1.0]]).log()
    mask_BT = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    loss = stream_mean(cross_entropy(logprobs_BT), mask_BT, 3)
    assert loss.item() == pytest.approx((math.log(2) + math.log(4) + math.log(5)) / 3)
    reference_BT = torch.tensor([[0.25, 0.5, 0.7], [0.2, 1.0, 1.0]]).log()
    loss_BT = distillation(logprobs_BT, reference_BT)
    torch.testing.assert_close(loss_BT[mask_BT > 0], torch.tensor([math.log(2), -math.log(2), 0.0]))
    assert stream_mean(loss_BT, 0 * mask_BT, 0).item() == 0


def test_gradients_of_streams_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_BTV, reference_BTV = torch.randn(2, 2, 3, 5, generator=generator, dtype=torch.float64)
    logits_BTV.requires_grad_()
    tokens_BT1 = torch.randint(5, (2, 3, 1), generator=generator)
    mask_BT = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)

    def imitated(logits_BTV: Tensor) -> Tensor:
        logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, tokens_BT1)[..., 0]
        return stream_mean(cross_entropy(logprobs_BT), mask_BT, 3)

    assert torch.autograd.gradcheck(imitated, (logits_BTV,))
    # The mean of the gradient over all actions is that of the divergence of the distributions.
    probabilities_BTV, logprobs_BTV = logits_BTV.softmax(-1), logits_BTV.log_softmax(-1)
    reference_BTV = reference_BTV.log_softmax(-1)
    divergence = (probabilities_BTV * (logprobs_BTV - reference_BTV)).sum()
    expected_BT1 = (probabilities_BTV.detach() * distillation(logprobs_BTV, reference_BTV)).sum()
    torch.testing.assert_close(expected_BT1, divergence)
    (found,) = torch.autograd.grad(expected_BT1, logits_BTV, retain_graph=True)
    (wanted,) = torch.autograd.grad(divergence, logits_BTV)
    torch.testing.assert_close(found, wanted)


def test_targets_are_what_the_env_shows_after_an_action() -> None:
    answer = with_mask([0, 0, 1, 1, 0, 0, 1, 0])
    assert observed_tokens(answer).tolist() == [False, False, False, False, True, True, False, True]


def with_mask(mask: Sequence[int]) -> m.Trajectory:
    """A trajectory with this action mask."""
    return m.Trajectory(
        token_ids=np.arange(len(mask)).astype(m.TOKEN_DTYPE).tobytes(),
        action_mask=np.array(mask, dtype=m.MASK_DTYPE).tobytes(),
        behaviour_logprobs=np.zeros(len(mask), dtype=m.LOGPROB_DTYPE).tobytes(),
        spans=[], reward=0.0, scores={}, finish_reason="done",
    )  # fmt: skip


def data_of(config: RunConfig, groups: Sequence[m.Group]) -> StepData:
    """A step of one update."""
    return build_step(
        [[(group, 1.0) for group in groups]],
        algorithms=config.algorithms, rewards=config.rewards, step=0, consuming_version=0,
    )  # fmt: skip


def turns_of(config: RunConfig) -> list[m.Group]:
    """Groups whose episodes have several turns."""
    return [in_turns(group, seed=number) for number, group in enumerate(step_groups(0, config))]


def test_cross_entropy_is_that_of_the_model_at_temperature_1(world: World, make_config: MakeConfig) -> None:
    config = make_config(updates_per_step=1, **CE)
    groups, train_step = turns_of(config), build_train_step(config, world)
    total, count = 0.0, 0
    for group in groups:
        for each in group.trajectories:
            (batch,) = pack([all_actions(token_ids(each))], token_budget=100)
            with torch.no_grad():
                logits = train_step.model(**batch.model_inputs()).logits[0].float()
            targets = torch.from_numpy(observed_tokens(each)[1:])
            total -= logits.log_softmax(-1).gather(1, batch.actions_S[:, None])[targets].sum().item()
            count += int(targets.sum())
    without = build_train_step(make_config(updates_per_step=1), world).run(
        data_of(make_config(updates_per_step=1), groups), unpublished_steps=0
    )
    figures = train_step.run(data_of(config, groups), unpublished_steps=0)
    assert (figures["ce_tokens"], figures["actions"]) == (count, without["actions"])
    assert figures["ce_loss"] == pytest.approx(total / count, rel=1e-5)
    assert figures["rl_loss"] == pytest.approx(without["loss"], rel=1e-5, abs=1e-7)
    assert figures["loss"] == pytest.approx(figures["rl_loss"] + 0.05 * figures["ce_loss"], rel=1e-5)
    assert figures["entropy"] == pytest.approx(without["entropy"], rel=1e-5)
    assert not [name for name in without if name.startswith(("rl_", "ce_", "ref_kl_"))]


@pytest.mark.parametrize("updates", [1, 2])
def test_streams_do_not_depend_on_micro_batches(updates: int, world: World, make_config: MakeConfig) -> None:
    settings: dict[str, Any] = {
        "updates_per_step": updates, "streams": {"rl": 0.5, "ce": 0.3, "ref_kl": 0.2}, "kl": {"coefficient": 0.0},
        "optimizer": {"lr": 1e-12},
    }  # fmt: skip
    found = []
    for token_budget in (40, 4000):
        config = make_config(token_budget=token_budget, **settings)
        groups, train_step = turns_of(config), build_train_step(config, world)
        assert train_step.reference is not None
        with torch.no_grad():
            for weight in train_step.reference.parameters():
                weight.mul_(0.9)
        half = len(groups) // updates
        data = build_step(
            [[(group, 1.0) for group in groups[n * half : (n + 1) * half]] for n in range(updates)],
            algorithms=config.algorithms, rewards=config.rewards, step=0, consuming_version=0,
        )  # fmt: skip
        found.append(train_step.run(data, unpublished_steps=0))
    assert found[0]["ref_kl_loss"] != pytest.approx(0, abs=1e-3)
    weighted = sum(weight * found[0][f"{name}_loss"] for name, weight in settings["streams"].items())
    assert found[0]["loss"] == pytest.approx(weighted, rel=1e-5)
    for name in ("loss", "rl_loss", "ce_loss", "ref_kl_loss", "ce_tokens", "ref_kl_tokens", "grad_norm"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4), name


def test_cross_entropy_alone_raises_the_likelihood_of_observations(world: World, make_config: MakeConfig) -> None:
    config = make_config(updates_per_step=1, streams={"rl": 0.0, "ce": 1.0})
    train_step, groups = build_train_step(config, world), turns_of(config)
    losses = [train_step.run(data_of(config, groups), unpublished_steps=0)["ce_loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.2


# --- algorithms of single envs ---------------------------------------------------------------------------------------

OTHER = {"advantage": "dr_grpo", "loss": {"name": "reinforce"}, "correction": {"weight": "none"}}


def test_envs_with_the_learners_algorithm_change_nothing(world: World, make_config: MakeConfig) -> None:
    plain = mixed_config(make_config(), {})
    mixed = mixed_config(make_config(), {"one": {"advantage": "grpo"}, "two": {"loss": "ppo"}})
    assert list(mixed.algorithms) == ["", "one", "two"]
    trained = []
    for config in (plain, mixed):
        train_step = build_train_step(config, world)
        figures = train_step.run(data_of(config, mixed_groups(0, config)), unpublished_steps=0)
        trained.append((figures, weights_of(train_step.model)))
    assert trained[0][0] == pytest.approx(trained[1][0], rel=1e-5, abs=1e-6)
    for name, tensor in trained[0][1].items():
        torch.testing.assert_close(trained[1][1][name], tensor, atol=1e-6, rtol=1e-4)


def test_envs_with_algorithms_train_without_rewards(world: World, make_config: MakeConfig) -> None:
    base = make_config(streams={"rl": 0.0, "ref_kl": 1.0}, distill={"teachers": [{}]})
    config = mixed_config(base.model_copy(update={"rewards": ()}), {"two": {"streams": {"rl": 0.0, "ref_kl": 0.5}}})
    figures = build_train_step(config, world).run(data_of(config, mixed_groups(0, config)), unpublished_steps=0)
    assert figures["ref_kl_tokens"] == figures["actions"]


def objective_of(train_step: TrainStep, data: StepData) -> tuple[Objective, Any, Any]:
    prepared = preparer_of(train_step)(
        data.rows, data.updates, consuming_version=0, unpublished_steps=0, kl_coefficient=0.0
    )
    ((batch,),) = data.updates
    mask_BT = batch.of_step(data.rows.mask_BT if prepared.correction is None else prepared.correction.mask_BT)
    tokens = {name: stream.mask_BT.sum().item() for name, stream in prepared.streams.items()}
    objective = Objective(
        algorithms=[Algorithm.of(each) for each in train_step.algorithms.values()],
        horizon=train_step.sampling.max_tokens, prepared=prepared, update=0, totals=totals_of(mask_BT), tokens=tokens,
        kl_coefficient=0.0, generator=torch.Generator(),
    )  # fmt: skip
    return objective, batch, score_actions(train_step.model, batch, temperature=0.8, targets=True)


@pytest.mark.parametrize(
    "correction", [{}, {"rejections": [{"level": "token", "estimator": "k1", "high": 1.5}]}], ids=str
)
def test_loss_is_the_sum_of_the_envs_parts(correction: Any, world: World, make_config: MakeConfig) -> None:
    base = make_config(token_budget=4000, correction=correction)
    config = mixed_config(base, {"two": {**OTHER, "streams": {"rl": 0.5, "ce": 0.1}}})
    groups = mixed_groups(0, config)
    mixed, batch, scores = objective_of(build_train_step(config, world), data_of(config, groups))
    loss, values = mixed(scores, batch)
    rows = mixed.prepared.rows
    assert rows.algorithm_B is not None
    expected = torch.zeros(())
    for index, settings in enumerate(({}, OTHER)):
        alone = make_config(token_budget=4000, **{"correction": correction, **settings})
        objective, own_batch, own_scores = objective_of(build_train_step(alone, world), data_of(alone, groups))
        own_B = (rows.algorithm_B == index).float()
        prepared = replace(objective.prepared, rows=replace(objective.prepared.rows, importance_weights_B=own_B))
        part, _ = replace(objective, prepared=prepared, totals=mixed.totals)(own_scores, own_batch)
        expected = expected + (0.5 if index else 1.0) * part
    observed_BT = mixed.prepared.streams["ce"].mask_BT
    assert set(observed_BT.sum(-1)[rows.algorithm_B == 0].tolist()) == {0}
    expected = expected - 0.1 * (values.target_BT * batch.of_step(observed_BT)).sum() / observed_BT.sum()
    torch.testing.assert_close(loss, expected)
