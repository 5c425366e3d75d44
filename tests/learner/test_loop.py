"""What a learner asks of the others when it is started again."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import create_autospec

import pytest
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


def buffer_of_a_learner_that_continues(step: int, config: RunConfig, world: World) -> Any:
    """The mock that a learner has talked to which starts from a checkpoint of `step`, and ends when it takes groups."""
    trainer = build_trainer(config, world)
    progress = Progress(step=step, version=step)
    save_checkpoint(RunFolder.of(config).checkpoints, trainer.trained, progress, world, keep=1)
    buffer = create_autospec(BufferClient, instance=True)
    buffer.hello.return_value = m.State(request=0, version=step, counts=m.LedgerCounts(), servers=[], evals=[])
    report = m.EvalReport(version=step + 1, score=1.0, tasks=8, eval_s=0.1, group_ids=[])
    buffer.take_evals.return_value = [report]
    root = Root(buffer, create_autospec(WeightPublisher, instance=True), create_autospec(Reporter, instance=True))
    feed = create_autospec(Feed, instance=True)
    feed.take.side_effect = NoGroupsError
    snapshots = SnapshotTaker(trainer.model, dtype=torch.float32, bucket_bytes=1 << 20, device=world.device)
    assert config.model.path is not None, "recorded runs have a model folder"
    loop = Loop(config, world, trainer, feed, snapshots, config.model.path, root)
    with suppress(NoGroupsError):
        loop.run()
    return buffer


@pytest.mark.parametrize("step", [2, STEPS])
def test_of_evaluations_that_were_cut_off_the_last_alone_is_asked_for_again(
    step: int, config: RunConfig, world: World
) -> None:
    buffer = buffer_of_a_learner_that_continues(step, config, world)
    buffer.published.assert_called_once_with(step + 1, evaluate=step == STEPS)
    assert buffer.finish.called == (step == STEPS)
