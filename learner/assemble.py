"""Puts a learner rank together: process group, model, optimizer, feed, and on rank 0 buffer, publisher and trackers."""

from contextlib import ExitStack

import torch

from slipstream.buffer.client import BufferClient
from slipstream.configs import RunConfig
from slipstream.configs.folder import RunFolder, initial_model
from slipstream.configs.logs import get_log
from slipstream.learner.distributed import join_world, leave_world
from slipstream.learner.feed import Feed
from slipstream.learner.loop import Loop, Root
from slipstream.learner.reporter import Reporter
from slipstream.learner.step import build_trainer
from slipstream.learner.throttle import Throttle
from slipstream.learner.tracking.build import build_trackers
from slipstream.learner.weights.publisher import WeightPublisher
from slipstream.learner.weights.snapshot import SnapshotTaker
from slipstream.learner.weights.transport import build_transport

log = get_log("learner.assemble")


def assemble(config: RunConfig, *, started: float, cleanup: ExitStack) -> Loop:
    """The training loop of this rank; `cleanup` undoes it.

    Args:
        started: Unix time at which the run was started.

    Raises: ConfigError when there is no model, an address is taken, or the batch does not divide among the ranks.
    """
    path = initial_model(config)
    world = join_world()
    cleanup.callback(leave_world)
    torch.manual_seed(config.run.seed)
    feed = Feed(config, world)
    cleanup.callback(feed.close)
    root = _root(config, started, cleanup) if world.is_root else None
    trainer = build_trainer(config, path, world)
    snapshots = SnapshotTaker(
        trainer.model,
        dtype=getattr(torch, config.model.dtype),
        bucket_bytes=config.weights.bucket_bytes,
        device=world.device if root is not None and root.publisher.on_device else torch.device("cpu"),
    )
    log.info("learner ready", rank=world.rank, ranks=world.size, device=str(world.device))
    return Loop(config, world, trainer, feed, snapshots, path, root, _throttle(config))


def _throttle(config: RunConfig) -> Throttle | None:
    """The throttle, if the run wants one."""
    if config.learner.throttle is None:
        return None
    return Throttle(config.learner.throttle, config.buffer.max_staleness)


def _root(config: RunConfig, started: float, cleanup: ExitStack) -> Root:
    """Rank 0's connections."""
    folder = RunFolder.of(config)
    folder.create(config)
    buffer = BufferClient(config, "learner")
    cleanup.callback(buffer.close)
    publisher = WeightPublisher(config, build_transport(config.weights))
    cleanup.callback(publisher.close)
    reporter = Reporter(
        build_trackers(config),
        publisher.figures,
        steps=config.learner.steps,
        dtype=config.model.dtype,
        started=started,
    )
    return Root(buffer, publisher, reporter)
