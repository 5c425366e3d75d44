"""Groups that the learner's own model answers."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.buffer.policies.sampling import task_order
from slipstream.buffer.wire.messages import TOKEN_DTYPE, Trajectory, VersionSpan
from slipstream.configs import RunConfig
from slipstream.configs.load import load_config
from slipstream.configs.models import initial_model
from slipstream.configs.schema.run import EnvConfig
from slipstream.env.registry import build_env
from slipstream.learner.algorithms.scoring import score_actions
from slipstream.learner.data.buffer_feed import build_step
from slipstream.learner.parallel.mesh import join_world, leave_world
from slipstream.learner.trainers.step import Trainer, build_trainer
from slipstream.rewards.functions.match import digit_match
from slipstream.rollout_servers.tokenizer import Text
from slipstream.tools.bench.staleness.sampler import Sampler
from slipstream.tools.bench.staleness.studies import DEMO
from tests.learner.recorded import vivid

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """The demo with few answers at another temperature, its model's matrices ten times as large."""
    changes = ["learner.groups_per_step=4", "rollout.group_size=3", "rollout.sampling.temperature=0.7"]
    made = load_config(DEMO, [f"run.dir={tmp_path}", *changes])
    vivid(initial_model(made))
    return made


@pytest.fixture
def trainer(config: RunConfig) -> Iterator[Trainer]:
    """The learner before its first step."""
    world = join_world()
    yield build_trainer(config, initial_model(config), world)
    leave_world()


@pytest.fixture
def sampler(trainer: Trainer) -> Sampler:
    """A sampler on the learner's model."""
    return Sampler(trainer.config, trainer.model, initial_model(trainer.config))


@torch.no_grad()
def test_log_mu_is_what_the_learner_says_of_the_same_weights(trainer: Trainer, sampler: Sampler) -> None:
    dealt = [[(group, 1.0) for group in sampler.groups(0)]]
    data = build_step(dealt, trainer.config, step=0, consuming_version=0)
    ((batch,),) = data.updates
    scores = score_actions(trainer.model, batch, temperature=0.7)
    own_BT = torch.zeros_like(data.rows.mask_BT)
    batch.put(own_BT, scores.logprobs_A)
    assert data.rows.mask_BT.tolist() == [[1.0] * 3] * 12
    assert own_BT.std() > 0.5
    torch.testing.assert_close(own_BT, data.rows.behaviour_logprobs_BT, rtol=0, atol=1e-5)


def test_tasks_come_in_the_buffers_order_and_answers_are_judged_by_the_runs_rewards(
    trainer: Trainer, sampler: Sampler
) -> None:
    env = build_env(EnvConfig(name="digits", options={"operation": "reverse", "length": 3}))
    groups = sampler.groups(5) + sampler.groups(6)
    order = task_order(env.size("train"), seed=0, epoch=0)
    assert [group.indices for group in groups] == [[index] for index in order[:8]]
    assert [group.id for group in groups] == [str(number) for number in range(8)]
    text = Text(initial_model(trainer.config))
    for group in groups:
        task = env.task("train", group.indices[0])
        for trajectory in group.trajectories:
            prompt, answer = text.decode([token_ids(trajectory)[:4], token_ids(trajectory)[4:]])
            assert prompt == task.prompt
            assert trajectory.reward == digit_match(answer, task.reference, {})
            assert trajectory.scores == {"digit_match": trajectory.reward, "exact_match": answer == task.reference}


def test_each_action_is_of_the_version_that_was_asked_for(sampler: Sampler) -> None:
    sampler.groups(5)
    spans = [trajectory.spans for group in sampler.groups(6) for trajectory in group.trajectories]
    assert spans == [[VersionSpan(version=6, start=4, end=7)]] * 12


def test_one_prompt_gets_different_answers(sampler: Sampler) -> None:
    (first, *_) = sampler.groups(0)
    assert len({trajectory.token_ids for trajectory in first.trajectories}) > 1


def token_ids(trajectory: Trajectory) -> list[int]:
    """Prompt and answer."""
    return [int(token) for token in np.frombuffer(trajectory.token_ids, dtype=TOKEN_DTYPE)]
