"""The reference model in a training step: what the penalty sees, and what it does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from slipstream.configs import RunConfig
from slipstream.learner.parallel.fsdp import full_weights
from slipstream.learner.parallel.mesh import World
from tests.learner.recorded import build_trainer, preparer_of, recorded_step, train

MakeConfig = Callable[..., RunConfig]


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_reference_is_the_initial_policy_and_stays_it(
    place: str, world: World, make_config: MakeConfig, groups: Path
) -> None:
    config = make_config(kl={"coefficient": 0.1, "place": place}, updates_per_step=1)
    trainer = build_trainer(config, world)
    assert trainer.reference is not None
    before = {name: tensor.clone() for name, tensor in full_weights(trainer.reference)}
    first, second, *_ = train(trainer, groups, range(3))
    assert first["reference_kl"] == pytest.approx(0, abs=1e-6)
    assert second["reference_kl"] > 1e-4
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_weights(trainer.reference))


def test_between_steps_the_reference_is_sharded_like_the_policy(
    world: World, make_config: MakeConfig, groups: Path
) -> None:
    """FSDP leaves what is in no layer gathered for a backward pass, which a reference never has."""
    trainer = build_trainer(make_config(kl={"coefficient": 0.1}), world)
    train(trainer, groups, [0])
    assert trainer.reference is not None
    gathered = [name for name, weight in trainer.reference.named_parameters() if not isinstance(weight, DTensor)]
    assert gathered == []


@pytest.mark.parametrize(("place", "estimator"), [("loss", "k3"), ("loss", "k1+"), ("loss", "k2")])
def test_a_larger_penalty_keeps_the_policy_nearer_to_the_reference(
    place: str, estimator: str, world: World, make_config: MakeConfig, groups: Path
) -> None:
    last = []
    for coefficient in (1e-6, 3.0):
        kl = {"coefficient": coefficient, "place": place, "estimator": estimator}
        config = make_config(kl=kl, advantage="rloo", optimizer={"lr": 5e-4, "warmup_steps": 0})
        last.append(train(build_trainer(config, world), groups, [0, 1, 2, 0, 1, 2])[-1]["reference_kl"])
    assert last[1] < 0.7 * last[0]


@pytest.mark.parametrize("proximal", ["recompute", "behaviour", "interpolate"])
def test_in_the_reward_the_penalty_lowers_the_advantage_of_answers_that_left_the_reference(
    proximal: str, world: World, make_config: MakeConfig, groups: Path
) -> None:
    kl = {"coefficient": 1.0, "place": "reward", "estimator": "k1"}
    config = make_config(kl=kl, advantage="dr_grpo", correction={"proximal": proximal})
    trainer = build_trainer(config, world)
    train(trainer, groups, range(2))  # so that policy and reference differ
    data = recorded_step(groups, 2, config, rank=0, world_size=1)
    prepare = preparer_of(trainer)
    without, penalised = (
        prepare(data.rows, data.updates, consuming_version=2, unpublished_steps=0, kl_coefficient=coefficient)
        for coefficient in (0.0, 0.5)
    )
    assert penalised.reference_logprobs_BT is not None
    assert (penalised.proximal_logprobs_BT[data.rows.mask_BT > 0] < 0).all(), "some were not scored"
    divergence_B = (penalised.proximal_logprobs_BT - penalised.reference_logprobs_BT).sum(-1)
    assert divergence_B.abs().max() > 0.1
    by_group = divergence_B.reshape(data.rows.groups, -1)
    expected_B = -0.5 * (by_group - by_group.mean(1, keepdim=True)).flatten()
    change_BT = penalised.advantages_BT - without.advantages_BT
    torch.testing.assert_close(change_BT, expected_B[:, None] * data.rows.mask_BT, atol=1e-4, rtol=1e-4)


def test_an_adaptive_coefficient_grows_while_the_divergence_is_above_its_target(
    world: World, make_config: MakeConfig, groups: Path
) -> None:
    kl: dict[str, Any] = {"coefficient": 0.01, "target": 1e-5, "horizon": 64}  # in answers, of which a step has 32
    figures = train(build_trainer(make_config(kl=kl), world), groups, range(4))
    coefficients = [each["kl_coefficient"] for each in figures]
    assert coefficients[0] == 0.01
    assert coefficients[1:] == pytest.approx([coefficients[1], 1.1 * coefficients[1], 1.1**2 * coefficients[1]])
    fixed = train(build_trainer(make_config(kl={"coefficient": 0.01}), world), groups, range(2))
    assert [each["kl_coefficient"] for each in fixed] == [0.01] * 2
