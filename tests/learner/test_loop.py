"""What a learner asks of the others when it is started again."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import create_autospec

import pytest
import structlog
import torch

from slipstream.buffer.client import BufferClient
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.folder import RunFolder
from slipstream.learner.checkpoint import Progress, save_checkpoint
from slipstream.learner.distributed import World
from slipstream.learner.feed import Feed
from slipstream.learner.loop import Loop, Root
from slipstream.learner.reporter import Reporter
from slipstream.learner.weights.publication import SyncFigures
from slipstream.learner.weights.publisher import WeightPublisher
from slipstream.learner.weights.snapshot import SnapshotTaker
from tests.learner.recorded import build_trainer

STEPS = 3


@pytest.fixture
def config(make_config: Callable[..., RunConfig]) -> RunConfig:
    base = make_config(steps=STEPS)
    return base.model_copy(update={"eval": base.eval.model_copy(update={"tasks": 8, "every_steps": 2})})


class NoGroupsError(Exception):
    """Ends a learner that would go on training."""


@dataclass
class Learner:
    """One that starts from a checkpoint, among mocks."""

    loop: Loop
    feed: Any
    buffer: Any
    publisher: Any

    def run(self) -> None:
        """To its end, or to where it takes groups."""
        with suppress(NoGroupsError):
            self.loop.run()


def learner_that_continues(step: int, config: RunConfig, world: World) -> Learner:
    """It ends when it takes groups."""
    trainer = build_trainer(config, world)
    progress = Progress(step=step, version=step)
    save_checkpoint(RunFolder.of(config).checkpoints, trainer.trained, progress, world, keep=1)
    buffer = create_autospec(BufferClient, instance=True)
    buffer.hello.return_value = m.State(request=0, version=step, counts=m.LedgerCounts(), servers=[], evals=[])
    report = m.EvalReport(version=step + 1, score=1.0, tasks=8, failed=0, eval_s=0.1, group_ids=[])
    buffer.take_evals.return_value = [report]
    publisher = create_autospec(WeightPublisher, instance=True)
    publisher.figures = SyncFigures()
    feed = create_autospec(Feed, instance=True)
    feed.take.side_effect = NoGroupsError
    snapshots = SnapshotTaker(trainer.model, dtype=torch.float32, bucket_bytes=1 << 20, device=world.device)
    assert config.model.path is not None, "recorded runs have a model folder"
    root = Root(buffer, publisher, create_autospec(Reporter, instance=True))
    return Learner(Loop(config, world, trainer, feed, snapshots, config.model.path, root), feed, buffer, publisher)


@pytest.mark.parametrize("step", [2, STEPS, STEPS + 1])
def test_of_evaluations_that_were_cut_off_the_last_alone_is_asked_for_again(
    step: int, config: RunConfig, world: World
) -> None:
    learner = learner_that_continues(step, config, world)
    with structlog.testing.capture_logs() as said:
        learner.run()
    buffer = learner.buffer
    buffer.published.assert_called_once_with(step + 1, evaluate=step >= STEPS)
    assert buffer.finish.called == (step >= STEPS)
    assert [line["event"] for line in said].count(
        "the checkpoint has more steps than learner.steps: the run ends with it"
    ) == (step > STEPS)


@pytest.mark.parametrize("members", [0, 1])
def test_while_it_waits_it_repeats_what_redis_may_have_lost_and_says_once_that_weights_reach_nobody(
    members: int, config: RunConfig, world: World
) -> None:
    learner = learner_that_continues(2, config, world)
    status = m.ServerStatus(server="r0", version=2)
    learner.buffer.state.return_value = m.State(
        request=0, version=3, counts=m.LedgerCounts(), servers=[status], evals=[]
    )
    learner.publisher.figures.members = members

    def take(meanwhile: Callable[[], None]) -> None:
        for _ in range(2):
            meanwhile()
        raise NoGroupsError

    learner.feed.take.side_effect = take
    with structlog.testing.capture_logs() as said:
        learner.run()
    assert learner.buffer.say_again.call_count == 2
    warned = [line for line in said if line["event"].startswith("NO ROLLOUT SERVER GETS WEIGHTS")]
    assert len(warned) == (members == 0)
