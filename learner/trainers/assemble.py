"""Start of a learner rank with the configured trainer: models, process group, equal settings, checkpoints."""

import logging
from contextlib import ExitStack
from inspect import isabstract
from typing import Any

from slipstream.configs import RunConfig, agreement
from slipstream.configs.load import create_run_folder
from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.signals import GracefulStop
from slipstream.configs.schema.trainers import TRAINERS, TrainerConfig
from slipstream.learner.checkpoint import open_checkpoints
from slipstream.learner.metrics.events import EventLog
from slipstream.learner.metrics.starts import record_start
from slipstream.learner.parallel.mesh import World, join_world, leave_world
from slipstream.learner.parallel.watchdog import watch_ranks
from slipstream.learner.trainers.base import Trainer
from slipstream.learner.trainers.setup import RankSetup
from slipstream.learner.upload import RunStore, StoreError, Uploader, fetch_checkpoint
from slipstream.models.folder import initial_model

log = get_log("learner.assemble")


def find_trainer(config: TrainerConfig) -> type[Trainer[Any]]:
    """The configured class of trainers.

    Raises: ConfigError when there is none of that name, it can't be imported, or it is no complete trainer.
    """
    trainer = TRAINERS.load(config.name)
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        raise ConfigError(f"trainer {config.name!r} must be a subclass of slipstream.learner.trainers.base.Trainer")
    if isabstract(trainer):
        missing = ", ".join(sorted(trainer.__abstractmethods__))
        raise ConfigError(f"trainer {config.name!r} lacks {missing}, which every trainer defines")
    return trainer


def assemble(
    kind: type[Trainer[Any]],
    config: RunConfig,
    *,
    started: float,
    cleanup: ExitStack,
    signals: GracefulStop,
    undo_steps: bool = False,
) -> Trainer[Any]:
    """The trainer of this rank, which has joined the others; `cleanup` undoes it.

    Args:
        kind: class of the trainer.
        started: start of the run, by this host's monotonic clock, which all its processes share.
        signals: stop signals of this process.
        undo_steps: undo steps that a checkpoint of the run contains, but not the one in this folder.

    Raises: ConfigError when there is no model, the ranks' configurations differ, or the trainer can't be built;
    CheckpointError when not all ranks see the folder for checkpoints.
    """
    problems = kind.problems(config)
    if problems:
        raise ConfigError(problems)
    path = initial_model(config)
    world = _join_ranks(config, kind, cleanup)
    events = _start_events(config.paths, started, cleanup) if world.is_root else None
    uploads = _start_uploads(config, world)
    trainer = kind.from_setup(
        RankSetup(
            config=config,
            initial_model=path,
            world=world,
            signals=signals,
            cleanup=cleanup,
            started=started,
            events=events,
            undo_steps=undo_steps,
        )
    )
    trainer.uploads = uploads
    log.info("learner ready", rank=world.rank, ranks=world.size, device=str(world.device))
    return trainer


def _join_ranks(config: RunConfig, kind: type[Trainer[Any]], cleanup: ExitStack) -> World:
    """Joins the other ranks, which must have the same settings and see the same checkpoints; `cleanup` leaves them."""
    world = join_world(config.learner.parallel, root_waits_s=kind.root_waits_s(config))
    cleanup.callback(leave_world)
    cleanup.enter_context(watch_ranks(world, deadline_s=config.learner.wait_deadline_s))
    _require_same_settings(kind.rank_settings(config), world)
    # First of all that is written: there may be no room for anything else.
    open_checkpoints(config.paths.checkpoints, world, keep=config.learner.checkpoint.keep)
    if world.is_root:
        create_run_folder(config.paths, config)
    return world


def _start_events(paths: RunPaths, started: float, cleanup: ExitStack) -> EventLog:
    """Records this start of the run, and from now on its warnings; `cleanup` ends that."""
    record_start(paths.starts)
    events, process_log = EventLog(paths.events, started=started), logging.getLogger()
    process_log.addHandler(events)
    cleanup.callback(events.close)
    cleanup.callback(process_log.removeHandler, events)
    return events


def _start_uploads(config: RunConfig, world: World) -> Uploader | None:
    """Rank 0's uploads, None on other ranks; if there is no checkpoint here, the latest is fetched. A collective.

    Raises: ConfigError when there is no client for the store, StoreError, on all ranks, when it can't be read.
    """
    url, problem = config.learner.checkpoint.upload, None
    if url is None:
        return None
    store = RunStore(url, run=config.run.name)
    if world.is_root:
        try:
            fetch_checkpoint(store, config.paths)
        except StoreError as error:
            problem = str(error)
    problem = world.from_root(problem)
    if problem is not None:
        raise StoreError(problem)
    return Uploader(store, config.paths, keep=config.learner.checkpoint.keep) if world.is_root else None


def _require_same_settings(own: dict[str, str], world: World) -> None:
    """Raises: ConfigError, on all ranks, when one has other settings than rank 0.

    Such ranks would deadlock, or train their shards of the weights differently.
    """
    of_ranks = world.gather(own)
    for rank, settings in enumerate(of_ranks):
        difference = agreement.find_difference(settings, of_ranks[0], "on rank 0")
        if difference is not None:
            raise ConfigError(f"learner rank {rank}: {difference}; give all ranks the same configuration")
