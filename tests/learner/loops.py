"""Learners whose loop is real, and who train, among mocks."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import torch

from slipstream.buffer.client.learner import BufferClient
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.learner.checkpoint import Progress, save_checkpoint
from slipstream.learner.data.buffer_feed import Feed, StepData
from slipstream.learner.metrics.reporter import Reporter
from slipstream.learner.parallel.mesh import World
from slipstream.learner.throttle import Throttle
from slipstream.learner.trainers.rl import Loop, Root
from slipstream.learner.trainers.step import Trainer
from slipstream.learner.weights.distribution import SyncFigures
from slipstream.learner.weights.publisher import WeightPublisher
from slipstream.learner.weights.snapshot import SnapshotTaker
from tests.learner.recorded import build_trainer, prober_of, recorded_step


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
    save_checkpoint(config.paths.checkpoints, trainer.trained, progress, world, keep=1)
    return learner_beside(trainer, version=step)


def learner_beside(trainer: Trainer, *, version: int) -> Learner:
    """One whose buffer knows of that version; it ends when it takes groups."""
    config, world = trainer.config, trainer.world
    buffer = create_autospec(BufferClient, instance=True)
    buffer.hello.return_value = m.State(request=0, version=version, counts=m.LedgerCounts(), servers=[], evals=[])
    report = m.EvalReport(version=version + 1, score=1.0, tasks=8, failed=0, eval_s=0.1, group_ids=[])
    buffer.take_evals.return_value = [report]
    publisher = create_autospec(WeightPublisher, instance=True)
    publisher.figures = SyncFigures()
    feed = create_autospec(Feed, instance=True)
    feed.take.side_effect = NoGroupsError
    snapshots = SnapshotTaker(trainer.model, dtype=torch.float32, bucket_bytes=1 << 20, device=world.device)
    assert config.model.path is not None, "recorded runs have a model folder"
    root = Root(buffer, publisher, create_autospec(Reporter, instance=True))
    watches = config.learner.throttle
    throttle = None if watches is None else Throttle(watches, config.buffer.max_staleness)
    loop = Loop(config, world, trainer, feed, snapshots, config.model.path, root, prober_of(trainer), throttle)
    return Learner(loop, feed, buffer, publisher)


def third_step(groups: Path, config: RunConfig) -> StepData:
    """What a learner gets that has done two."""
    return recorded_step(groups, 2, config, rank=0, world_size=1)
