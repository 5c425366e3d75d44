"""Assembly of a learner rank from its configuration: process group, models, feed; on rank 0 also connections."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.buffer.client.groups import GroupReader
from slipstream.buffer.client.learner import BufferClient, new_incarnation
from slipstream.buffer.identity import find_difference
from slipstream.configs import RunConfig, agreement
from slipstream.configs.load import create_run_folder
from slipstream.configs.models import initial_model, model_folder, model_problems
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.signals import GracefulStop
from slipstream.configs.schema.algorithms import GROUP_RELATIVE
from slipstream.configs.schema.learner import KlConfig, LearnerConfig
from slipstream.configs.schema.run import ModelConfig
from slipstream.configs.schema.weights import Transport, WeightsConfig
from slipstream.learner.algorithms.critic import load_critic
from slipstream.learner.algorithms.kl import KlCoefficient
from slipstream.learner.checkpoint import open_checkpoints
from slipstream.learner.data.balance import SequenceCost
from slipstream.learner.data.buffer_feed import Feed, FeedSettings
from slipstream.learner.data.images import ImageReader
from slipstream.learner.metrics.rl_reporter import RLReporter
from slipstream.learner.metrics.samples import SampleStore
from slipstream.learner.metrics.signal import SignalWatch, has_fixed_length
from slipstream.learner.metrics.trackers.registry import build_trackers
from slipstream.learner.models.identity import require_same_tokens
from slipstream.learner.models.load import ModelOptions, load_model, vocabulary_of
from slipstream.learner.models.lora import has_adapters
from slipstream.learner.models.optim import build_optimizer
from slipstream.learner.parallel.mesh import World, join_world, leave_world
from slipstream.learner.parallel.watchdog import watch_ranks
from slipstream.learner.throttle import Throttle
from slipstream.learner.trainers.base import LoopSettings
from slipstream.learner.trainers.rl import RLTraining, RootServices
from slipstream.learner.trainers.step import Trainer
from slipstream.learner.weights.publisher import WeightPublisher
from slipstream.learner.weights.snapshot import Prober, SnapshotTaker
from slipstream.learner.weights.transports.base import build_transports

log = get_log("learner.assemble")

PROBE_TOKENS = 32
"""Length of the probe whose log-probs learner and engines compare."""


def assemble(
    config: RunConfig, *, started: float, cleanup: ExitStack, signals: GracefulStop, undo_steps: bool = False
) -> RLTraining:
    """The training of this rank; `cleanup` undoes it.

    Args:
        started: start of the run, by this host's monotonic clock, which all its processes share.
        signals: stop signals of this process.
        undo_steps: undo steps that a checkpoint of the run contains, but not the one in this folder.

    Raises: ConfigError when there is no model, the ranks' configurations differ, an address is taken, the batch does
    not divide among the ranks, or there is no room for the only transport that may be used;
    CheckpointError when not all ranks see the folder for checkpoints.
    """
    problems = model_problems(config.model, config.learner)
    if problems:
        raise ConfigError(problems)
    path = initial_model(config)
    world = _join_ranks(config, cleanup)
    incarnation = new_incarnation()
    feed = build_feed(config, path, world, incarnation, signals, images=ImageReader.of(path))
    cleanup.callback(feed.close)
    root = _root_services(config, incarnation, started, signals, cleanup) if world.is_root else None
    trainer = build_trainer(config, path, world)
    snapshots = snapshot_taker(
        trainer.model,
        config.weights,
        run=config.run.name,
        dtype=getattr(torch, config.model.dtype_here),
        device=world.device,
        publisher=None if root is None else root.publisher,
    )
    cleanup.callback(snapshots.close)
    log.info("learner ready", rank=world.rank, ranks=world.size, device=str(world.device))
    # The engine must be able to read the probe, and to generate one token more.
    tokens = min(PROBE_TOKENS, config.rollout.engine.max_model_len - 1)
    return build_training(
        config,
        path,
        trainer=trainer,
        feed=feed,
        # Connects only when it is needed.
        read_groups=lambda ids: GroupReader(config.redis, run=config.run.name).read(ids),
        snapshots=snapshots,
        prober=Prober(trainer.model, tokens=tokens, vocabulary=vocabulary_of(trainer.model), device=world.device),
        root=root,
        signals=signals,
        undo_steps=undo_steps,
    )


def _join_ranks(config: RunConfig, cleanup: ExitStack) -> World:
    """Joins the other ranks, which must have the same settings and see the same checkpoints; `cleanup` leaves them."""
    root_waits_s = config.redis.outage_deadline_s + config.eval.deadline_s
    world = join_world(config.learner.parallel, root_waits_s=root_waits_s)
    cleanup.callback(leave_world)
    cleanup.enter_context(watch_ranks(world, deadline_s=config.learner.wait_deadline_s))
    _require_same_settings(agreement.rank_settings(config), world)
    # First of all that is written: there may be no room for anything else.
    open_checkpoints(config.paths.checkpoints, world, keep=config.learner.checkpoint.keep)
    return world


def _require_same_settings(own: dict[str, str], world: World) -> None:
    """Raises: ConfigError, on all ranks, when one has other settings than rank 0.

    Such ranks would deadlock, or train their shards of the weights differently.
    """
    of_ranks = world.gather(own)
    for rank, settings in enumerate(of_ranks):
        found = find_difference(settings, of_ranks[0], "on rank 0")
        if found is not None:
            raise ConfigError(f"learner rank {rank}: {found}; give all ranks the same configuration")


def build_feed(
    config: RunConfig,
    path: Path,
    world: World,
    incarnation: str,
    signals: GracefulStop | None = None,
    images: ImageReader | None = None,
) -> Feed:
    """The feed of a learner whose policy starts from `path`; `incarnation` is the learner's.

    Raises: ConfigError when the groups of an update do not divide among the ranks.
    """
    signals = signals or GracefulStop()
    settings = FeedSettings(
        groups_per_step=config.learner.groups_per_step,
        updates_per_step=config.learner.updates_per_step,
        token_budget=config.learner.token_budget,
        cost=SequenceCost.of_model(path),
        rewards=config.rewards,
        wait_deadline_s=config.learner.wait_deadline_s,
        outage_deadline_s=config.redis.outage_deadline_s,
        max_staleness=config.buffer.max_staleness,
        weights=config.weights,
    )
    settings.require_equal_shares(world.data_size)
    buffer = None
    if world.is_root:
        buffer = BufferClient(config, "learner-feed", incarnation, is_stopping=signals.is_requested)
    return Feed(settings, world, GroupReader(config.redis, run=config.run.name), buffer, signals, images)


def build_trainer(config: RunConfig, path: Path, world: World) -> Trainer:
    """Models and optimizers of a run whose policy starts from `path`; a collective.

    Raises: ConfigError when a model can't be trained, or a plug-in does not exist or takes other options.
    """
    torch.manual_seed(config.run.seed)
    options = model_options(config.model, config.learner)
    model = load_model(path, options, world)
    live = replace(options, router_replay=False)  # reference and critic are models of their own
    return Trainer(
        learner=config.learner,
        sampling=config.rollout.sampling,
        rewards=config.rewards,
        steps_per_version=config.weights.publish_every_steps,
        seed=config.run.seed,
        checkpoints=config.paths.checkpoints,
        world=world,
        model=model,
        optimizer=build_optimizer(model, config.learner.optimizer),
        reference=_load_reference(config.learner.kl, model, path, live, world),
        critic=load_critic(config.learner.critic, path, live, world),
        kl=None if config.learner.kl is None else KlCoefficient(config.learner.kl),
    )


def model_options(model: ModelConfig, learner: LearnerConfig) -> ModelOptions:
    """Options of all models of a training."""
    return ModelOptions(
        dtype=getattr(torch, model.dtype_here),
        attention=learner.attention,
        activation_checkpointing=learner.activation_checkpointing,
        train_vision_encoder=model.train_vision_encoder,
        lora=model.lora,
        offload=learner.offload,
        compile=learner.compile,
        router_replay=learner.router_replay,
    )


def _load_reference(
    kl: KlConfig | None, model: nn.Module, policy: Path, options: ModelOptions, world: World
) -> nn.Module | None:
    """The frozen reference of the KL penalty; None if there is no penalty.

    Args:
        model: the policy. If it has adapters, it is the reference too: without them it is the initial policy.
        policy: the folder of its initial weights.

    Raises: ConfigError when it can't be run, or has other tokens than the policy.
    """
    if kl is None:
        return None
    if kl.reference is None:
        return model if has_adapters(model) else load_model(policy, options, world).requires_grad_(False)
    folder = model_folder("learner.kl.reference", kl.reference)
    reference = load_model(folder, replace(options, lora=None), world)
    vocabulary = vocabulary_of(reference)
    require_same_tokens("learner.kl.reference", folder, policy, vocabulary=vocabulary, world=world)
    return reference.requires_grad_(False)


def build_training(config: RunConfig, initial_model: Path, *, trainer: Trainer, **parts: Any) -> RLTraining:
    """The training of a configuration, of its parts (fields of RLTraining)."""
    throttle, max_staleness = config.learner.throttle, config.buffer.max_staleness
    return RLTraining(
        settings=LoopSettings(
            steps=config.learner.steps,
            checkpoint=config.learner.checkpoint,
            evaluation=config.eval,
            paths=config.paths,
            initial_model=initial_model,
            export_dtype=getattr(torch, config.model.dtype_here),
            export_adapter=config.model.lora is not None and config.model.lora.export == "adapter",
        ),
        world=trainer.world,
        weights=config.weights,
        max_staleness=max_staleness,
        token_budget=config.learner.token_budget,
        trainer=trainer,
        throttle=None if throttle is None else Throttle(throttle, max_staleness),
        **parts,
    )


def snapshot_taker(
    model: nn.Module,
    weights: WeightsConfig,
    *,
    run: str,
    dtype: torch.dtype,
    device: torch.device,
    publisher: WeightPublisher | None,
) -> SnapshotTaker:
    """The snapshot taker, on the device if the publisher can send from there and there is room, else on the host.

    Args:
        publisher: rank 0's, None on other ranks.

    Raises: ConfigError when the only transport that may be used has no room for two versions.
    """

    def on(device: torch.device) -> SnapshotTaker:
        return SnapshotTaker(
            model,
            dtype=dtype,
            bucket_bytes=weights.bucket_bytes,
            device=device,
            segments=run if publisher is not None and publisher.in_place else None,
        )

    host = torch.device("cpu")
    if publisher is None:
        return on(host)
    try:
        snapshots = on(device if publisher.on_device else host)
    except torch.OutOfMemoryError as error:
        reason = f"{device} has no room for two versions of the weights: {error}"
        _withdraw(publisher, [each for each in publisher.offered if each.direct], weights, reason)
        snapshots = on(host)
    if snapshots.no_shared_memory is not None:
        in_place = [each for each in publisher.offered if each.in_place]
        _withdraw(publisher, in_place, weights, snapshots.no_shared_memory)
    return snapshots


def _withdraw(publisher: WeightPublisher, transports: list[Transport], weights: WeightsConfig, reason: str) -> None:
    if weights.transport in {transport.key for transport in transports}:
        raise ConfigError(f"weights.transport={weights.transport}: {reason}")
    for transport in transports:
        log.warning("weight transport withdrawn", transport=transport.name, reason=reason)
        publisher.withdraw(transport.name)


def _root_services(
    config: RunConfig, incarnation: str, started: float, signals: GracefulStop, cleanup: ExitStack
) -> RootServices:
    """Rank 0's connections and trackers; creates the run's folder."""
    create_run_folder(config.paths, config)
    buffer = BufferClient(config, "learner", incarnation, is_stopping=signals.is_requested)
    cleanup.callback(buffer.close)
    publisher = WeightPublisher(config.weights, config.security, build_transports(config), run=config.run.name)
    cleanup.callback(publisher.close)
    reporter = RLReporter(
        build_trackers(config.paths, config.tracking, run=config.run.name, recorded=config.model_dump(mode="json")),
        publisher.figures,
        steps=config.learner.steps,
        dtype=config.model.dtype_here,
        signal=SignalWatch(
            group_relative=config.learner.advantage.name in GROUP_RELATIVE,
            fixed_length=has_fixed_length(config.rollout.sampling),
        ),
        eval_reward=config.eval.reward,
        started=started,
    )
    return RootServices(buffer, publisher, reporter, SampleStore(config.paths.samples))
