"""RL trainers with real training steps, and mocks of feed, buffer and publisher."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import torch

from slipstream.buffer.client import BufferClient
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.learner.checkpoint import save_checkpoint
from slipstream.learner.data.buffer_feed import Feed, StepData
from slipstream.learner.metrics.rl_reporter import RLReporter
from slipstream.learner.metrics.samples import SampleStore
from slipstream.learner.parallel.mesh import World
from slipstream.learner.step_records import StepRecords
from slipstream.learner.trainers.rl.parts import RootServices
from slipstream.learner.trainers.rl.step import TrainStep
from slipstream.learner.trainers.rl.trainer import RLState, RLTrainer
from slipstream.learner.weights.members import SyncMetrics
from slipstream.learner.weights.publisher import WeightPublisher
from slipstream.learner.weights.snapshot import SnapshotTaker
from tests.learner.recorded import build_train_step, prober_of, recorded_step


class NoGroupsError(Exception):
    """Ends a training that waits for groups."""


@dataclass
class Learner:
    """A training and its mocks."""

    config: RunConfig
    loop: RLTrainer
    feed: Any
    buffer: Any
    publisher: Any

    def run(self) -> None:
        """Runs it to its end, or until it waits for groups."""
        with suppress(NoGroupsError):
            self.loop.run()


def learner_that_continues(step: int, config: RunConfig, world: World) -> Learner:
    """A training that starts from a checkpoint of that step."""
    train_step = build_train_step(config, world)
    state = RLState(step=step, version=step)
    save_checkpoint(config.paths.checkpoints, train_step.trained, state, world, keep=1)
    return learner_beside(config, train_step, version=step)


def learner_beside(config: RunConfig, train_step: TrainStep, *, version: int) -> Learner:
    """A training whose buffer reports that version."""
    buffer = create_autospec(BufferClient, instance=True)
    buffer.hello.return_value = m.State(request=0, version=version, counts=m.LedgerCounts(), servers=[], evals=[])
    report = m.EvalReport(version=version + 1, score=1.0, tasks=8, failures={}, eval_s=0.1, group_ids=[])
    buffer.take_evals.return_value = [report]
    publisher = create_autospec(WeightPublisher, instance=True)
    publisher.metrics = SyncMetrics()
    feed = create_autospec(Feed, instance=True)
    feed.take.side_effect, feed.images = NoGroupsError, None
    snapshots = SnapshotTaker(
        train_step.model, dtype=torch.float32, bucket_bytes=1 << 20, device=train_step.world.device
    )
    assert config.model.path is not None, "recorded runs have a model folder"
    reporter = create_autospec(RLReporter, instance=True)
    reporter.rollout_metrics.return_value = reporter.sync_metrics.return_value = {}
    samples, records = SampleStore(config.paths.samples), create_autospec(StepRecords, instance=True)
    root = RootServices(buffer, publisher, reporter, samples, records)
    loop = RLTrainer(
        config=config,
        initial_model=config.model.path,
        world=train_step.world,
        reporter=reporter,
        train_step=train_step,
        feed=feed,
        read_groups=lambda ids: [],
        snapshots=snapshots,
        prober=prober_of(train_step),
        root=root,
    )
    return Learner(config, loop, feed, buffer, publisher)


def third_step(groups: Path, config: RunConfig) -> StepData:
    """The data of the step after two."""
    return recorded_step(groups, 2, config, rank=0, world_size=1)
