"""RL training that resumes from a checkpoint, with mocks of buffer, publisher and feed."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import pytest
import structlog
import torch

from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.paths import checkpoint_steps
from slipstream.configs.runtime.errors import DeadlineError
from slipstream.learner.checkpoint import load_checkpoint, save_checkpoint
from slipstream.learner.data.buffer_feed import StarvedError
from slipstream.learner.models.optim import MOST_STEPS_SKIPPED, DivergedError
from slipstream.learner.parallel.fsdp import full_weights
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.rl.trainer import RLState
from slipstream.models.folder import model_fingerprint
from tests.learner.recorded import build_train_step, weights_of
from tests.learner.trainers.rl.loops import Learner, NoGroupsError, learner_beside, learner_that_continues, third_step

STEPS = 3
RUINOUS = {"lr": 1e30, "warmup_steps": 0}
"""One update along a finite gradient makes weights that are finite, and answers that are not."""


@pytest.fixture
def config(make_config: Callable[..., RunConfig]) -> RunConfig:
    base = make_config(steps=STEPS)
    return base.model_copy(update={"eval": base.eval.model_copy(update={"tasks": 8, "every_steps": 2})})


class Resume(Protocol):
    """Makes a learner that has done two steps; `sections` have changed keys of other sections than `learner`."""

    def __call__(self, sections: Mapping[str, Mapping[str, Any]] | None = None, **learner: Any) -> Learner: ...


@pytest.fixture
def resume(world: World, make_config: Callable[..., RunConfig]) -> Resume:
    def make(sections: Mapping[str, Mapping[str, Any]] | None = None, **learner: Any) -> Learner:
        base = make_config(**learner)
        changed = {name: getattr(base, name).model_copy(update=keys) for name, keys in (sections or {}).items()}
        return learner_that_continues(2, base.model_copy(update=changed), world)

    return make


@pytest.mark.parametrize(
    ("tasks", "every", "evaluated"), [(8, 2, [0, 2, 3]), (8, 0, [0, 3]), (0, 2, [])], ids=["every", "ends", "none"]
)
def test_evaluations_are_due(tasks: int, every: int, evaluated: list[int], resume: Resume) -> None:
    loop = resume({"eval": {"tasks": tasks, "every_steps": every}}, steps=STEPS).loop
    assert [step for step in range(STEPS + 1) if loop.evaluates_after(step)] == evaluated


@pytest.mark.parametrize("step", [2, STEPS, STEPS + 1])
def test_resume_requests_only_final_evaluation(step: int, config: RunConfig, world: World) -> None:
    learner = learner_that_continues(step, config, world)
    with structlog.testing.capture_logs() as logs:
        learner.run()
    buffer = learner.buffer
    buffer.published.assert_called_once_with(step + 1, evaluate=step >= STEPS)
    assert buffer.finish.called == (step >= STEPS)
    assert [line["event"] for line in logs].count(
        "the checkpoint has more steps than learner.steps: the run ends with it"
    ) == (step > STEPS)


@pytest.mark.parametrize(("latest", "continues_as"), [(7, 8), (0, 3)], ids=["undone", "forgotten"])
def test_resumed_weights_get_newest_version(latest: int, continues_as: int, config: RunConfig, world: World) -> None:
    learner = learner_that_continues(2, config, world)
    learner.buffer.hello.return_value = m.State(
        request=0, version=latest, counts=m.LedgerCounts(), servers=[], evals=[]
    )
    learner.run()
    learner.buffer.published.assert_called_once_with(continues_as, evaluate=False)
    learner.feed.prefetch.assert_called_once_with(2, consuming_version=continues_as)
    assert learner.loop.root is not None
    continued: Any = learner.loop.root.reporter.continued
    continued.assert_called_once_with(2, 2)


def test_versions_are_equally_many_steps_apart(resume: Resume, groups: Path) -> None:
    learner = resume({"weights": {"publish_every_steps": 3}}, steps=9)
    third = third_step(groups, learner.config)
    learner.feed.take.side_effect = [replace(third, step=step) for step in range(2, 6)] + [NoGroupsError]
    train_step = learner.loop.train_step
    with patch.object(train_step, "run", wraps=train_step.run) as step:
        learner.run()
    fetched = [(call.args[0], call.kwargs["consuming_version"]) for call in learner.feed.prefetch.call_args_list]
    assert fetched == [(2, 3), (3, 3), (4, 3), (5, 4), (6, 4)], "it resumes as version 3"
    assert [call.kwargs["unpublished_steps"] for call in step.call_args_list] == [0, 1, 2, 0]


def test_throttle_and_kl_coefficient_are_resumed(
    world: World, make_config: Callable[..., RunConfig], groups: Path
) -> None:
    config = make_config(
        steps=9, checkpoint={"every_steps": 1}, kl={"coefficient": 0.1, "target": 10.0, "horizon": 1},
        throttle={"max_kl": 1e-9, "hold_steps": 0, "learning_rate": True},
    )  # fmt: skip
    first = learner_that_continues(2, config, world)
    first.feed.take.side_effect = [third_step(groups, config), NoGroupsError]
    first.run()
    assert [call.args[0] for call in first.buffer.throttle.call_args_list] == [4, 2]
    assert first.loop.train_step.lr_scale == 0.5
    second = learner_beside(config, build_train_step(config, world), version=3)
    second.run()
    second.buffer.throttle.assert_called_once_with(2)
    assert second.loop.train_step.lr_scale == 0.5
    assert first.loop.throttle is not None and second.loop.throttle is not None
    assert second.loop.throttle.state() == pytest.approx(first.loop.throttle.state(), nan_ok=True)
    assert first.loop.train_step.kl is not None and second.loop.train_step.kl is not None
    assert second.loop.train_step.kl.value == first.loop.train_step.kl.value == pytest.approx(0.08)


@pytest.mark.parametrize(("members", "without_engine"), [(0, 0), (1, 0), (0, 1)])
def test_waiting_repeats_reports_and_warns_without_members(
    members: int, without_engine: int, config: RunConfig, world: World
) -> None:
    learner = learner_that_continues(2, config, world)
    status = m.ServerStatus(server="r0", version=2)
    learner.buffer.state.return_value = m.State(
        request=0, version=3, counts=m.LedgerCounts(), servers=[status], evals=[]
    )
    learner.publisher.metrics.members = members
    learner.publisher.without_engine = without_engine

    def take(meanwhile: Callable[[], None]) -> None:
        for _ in range(2):
            meanwhile()
        raise NoGroupsError

    learner.feed.take.side_effect = take
    with structlog.testing.capture_logs() as logs:
        learner.run()
    assert learner.buffer.repeat_reports.call_count == 2
    warned = [line for line in logs if line["event"].startswith("NO ROLLOUT SERVER GETS WEIGHTS")]
    assert len(warned) == (members + without_engine == 0)


@pytest.mark.parametrize(("publish_every_steps", "verify"), [(1, True), (1, False), (10, True)])
def test_diverged_policy_is_neither_published_nor_saved(
    publish_every_steps: int, verify: bool, resume: Resume, world: World, groups: Path
) -> None:
    weights = {"publish_every_steps": publish_every_steps, "verify": verify}
    checkpoint = {"every_steps": 1, "keep": 1}
    learner = resume({"weights": weights}, updates_per_step=1, checkpoint=checkpoint, optimizer=RUINOUS)
    before = weights_of(learner.loop.train_step.model)
    learner.feed.take.side_effect = [third_step(groups, learner.config)]
    with pytest.raises(DivergedError, match=r"step 3 .*learner.optimizer.lr.* step 2"):
        learner.run()
    learner.buffer.published.assert_called_once_with(3, evaluate=False)  # the version with which it continued
    assert learner.publisher.publish.call_count == 1
    assert (learner.publisher.publish.call_args.args[0].manifest.probe is not None) == verify
    folder = learner.config.paths.checkpoints
    assert checkpoint_steps(folder) == [2]
    load_checkpoint(folder, learner.loop.train_step.trained, world, RLState)
    for name, tensor in full_weights(learner.loop.train_step.model):
        assert torch.equal(tensor, before[name]), name


def test_diverged_checkpoint_is_not_published(world: World, config: RunConfig) -> None:
    learner = learner_that_continues(2, config, world)
    train_step, folder = learner.loop.train_step, config.paths.checkpoints
    torch.nn.init.constant_(train_step.model.get_parameter("lm_head.weight"), torch.inf)
    save_checkpoint(folder, train_step.trained, RLState(step=2, version=2), world, keep=1)
    with pytest.raises(DivergedError, match=f"step 2 .*{folder}"):
        learner.run()
    learner.publisher.publish.assert_not_called()


@pytest.mark.parametrize("spoiled", [2, MOST_STEPS_SKIPPED])
def test_skipped_updates_delay_checkpoint(spoiled: int, resume: Resume, groups: Path) -> None:
    learner = resume(steps=MOST_STEPS_SKIPPED + 3, groups_per_step=2, checkpoint={"every_steps": 3, "keep": 2})
    steps = [third_step(groups, learner.config) for _ in range(spoiled + 1)]
    for data in steps[:spoiled]:
        data.rows.behaviour_logprobs_BT[:, 0] = torch.nan
    learner.feed.take.side_effect = [*steps, NoGroupsError]
    folder = learner.config.paths.checkpoints
    if spoiled < MOST_STEPS_SKIPPED:
        learner.run()
        assert checkpoint_steps(folder) == [2, 2 + spoiled + 1]
        return
    with pytest.raises(DivergedError, match=r"20 updates .* grad_norm"):
        learner.run()
    assert checkpoint_steps(folder) == [2]


def test_evaluation_is_of_next_published_version(resume: Resume, groups: Path) -> None:
    learner = resume({"eval": {"tasks": 8, "every_steps": 3}, "weights": {"publish_every_steps": 2}}, steps=9)
    third = third_step(groups, learner.config)
    learner.feed.take.side_effect = [replace(third, step=step) for step in range(2, 8)] + [NoGroupsError]
    learner.run()
    published = [(call.args[0], call.kwargs["evaluate"]) for call in learner.buffer.published.call_args_list]
    assert published == [(3, False), (4, True), (5, True), (6, False)], "after 3 and 6 steps"


@pytest.mark.parametrize("every_steps", [1, 10], ids=["saved before", "not saved before"])
def test_starved_learner_saves_its_steps(every_steps: int, resume: Resume, groups: Path) -> None:
    learner = resume(steps=9, checkpoint={"every_steps": every_steps})
    learner.feed.take.side_effect = [third_step(groups, learner.config), *[StarvedError("too few groups")] * 2]
    with pytest.raises(StarvedError, match="too few groups"):
        learner.loop.run()
    assert checkpoint_steps(learner.config.paths.checkpoints) == [2, 3]
    learner.buffer.checkpointed.assert_called_once_with(3)
    assert learner.feed.take.call_count == (2 if every_steps == 1 else 3)


def test_training_continues_after_checkpoint_frees_redis(resume: Resume, groups: Path) -> None:
    """Redis holds the bytes of trained groups until a checkpoint has them: it may be full of these alone."""
    learner = resume(steps=9, checkpoint={"every_steps": 10})
    third = third_step(groups, learner.config)
    full = StarvedError("too few groups")
    learner.feed.take.side_effect = [third, full, replace(third, step=3), full, replace(third, step=4), NoGroupsError]
    learner.run()
    assert learner.loop.state.step == 5
    assert checkpoint_steps(learner.config.paths.checkpoints) == [3, 4]
    fetched = [(call.args[0], call.kwargs["consuming_version"]) for call in learner.feed.prefetch.call_args_list]
    assert fetched == [(2, 3), (3, 4), (3, 4), (4, 5), (4, 5), (5, 6)]


@pytest.mark.parametrize("steps_done", [0, 1])
def test_failed_checkpoint_keeps_starvation_error(steps_done: int, resume: Resume, groups: Path) -> None:
    learner = resume(steps=9, checkpoint={"every_steps": 10})
    trained = [third_step(groups, learner.config)][:steps_done]
    learner.feed.take.side_effect = [*trained, StarvedError("too few groups")]
    learner.buffer.checkpointed.side_effect = DeadlineError("the buffer is away")
    with structlog.testing.capture_logs() as logs, pytest.raises(StarvedError, match="too few groups"):
        learner.loop.run()
    assert [line["error"] for line in logs if line["log_level"] == "warning"] == ["the buffer is away"] * steps_done


def test_last_step_is_saved_after_skipped_update(resume: Resume, groups: Path) -> None:
    learner = resume({"eval": {"tasks": 0}}, steps=3, groups_per_step=2, checkpoint={"every_steps": 10})
    data = third_step(groups, learner.config)
    data.rows.behaviour_logprobs_BT[:, 0] = torch.nan
    learner.feed.take.side_effect = [data]
    learner.run()
    assert checkpoint_steps(learner.config.paths.checkpoints) == [2, 3]


def test_checkpoints_between_publications_have_fp32_weights(
    world: World, make_config: Callable[..., RunConfig], groups: Path
) -> None:
    """To see whether the policy is sound, FSDP gathers its weights as `model.dtype`."""
    base = make_config(checkpoint={"every_steps": 1})
    weights = base.weights.model_copy(update={"publish_every_steps": 10})
    model = base.model.model_copy(update={"dtype": "bfloat16"})
    config = base.model_copy(update={"weights": weights, "model": model})
    learner = learner_that_continues(2, config, world)
    learner.feed.take.side_effect = [third_step(groups, config), NoGroupsError]
    learner.run()
    restored = build_train_step(config, world)
    load_checkpoint(config.paths.checkpoints, restored.trained, world, RLState)
    trained = weights_of(learner.loop.train_step.model)
    for name, tensor in full_weights(restored.model):
        assert torch.equal(tensor, trained[name]), name
        assert not torch.equal(tensor, tensor.bfloat16().float()), name


def test_initial_model_is_announced_to_buffer(world: World, config: RunConfig) -> None:
    learner = learner_that_continues(2, config, world)
    learner.run()
    model = model_fingerprint(learner.loop.initial_model)
    learner.buffer.hello.assert_called_once_with(2, version=2, model=model, vocab_size=32, undo=False)


def test_steps_of_damaged_checkpoint_are_undone(world: World, config: RunConfig) -> None:
    learner = learner_that_continues(2, config, world)
    shutil.copytree(config.paths.checkpoints / "step-000002", config.paths.checkpoints / "step-000003")
    (config.paths.checkpoints / "step-000003" / "checksums.json").unlink()
    learner.run()
    assert learner.buffer.hello.call_args.args == (2,)
    assert learner.buffer.hello.call_args.kwargs["undo"] is True
