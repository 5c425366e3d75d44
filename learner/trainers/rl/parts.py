"""Parts of an RL trainer, built from the configuration: feed, models, snapshots; on rank 0 also connections."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from slipstream.buffer.client import BufferClient, GroupReader
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.signals import GracefulStop
from slipstream.configs.schema.learner import KlConfig
from slipstream.configs.schema.rollout import EngineConfig
from slipstream.configs.schema.weights import Transport, WeightsConfig
from slipstream.learner.algorithms.critic import load_critic
from slipstream.learner.algorithms.divergence import KlCoefficient
from slipstream.learner.algorithms.process_reward import load_process_reward
from slipstream.learner.algorithms.teachers import load_teachers
from slipstream.learner.data.balance import SequenceCost
from slipstream.learner.data.buffer_feed import Feed
from slipstream.learner.data.images import ImageReader
from slipstream.learner.metrics.fleet import FleetRecord
from slipstream.learner.metrics.rl_reporter import RLReporter, RunRecords
from slipstream.learner.metrics.samples import SampleStore
from slipstream.learner.metrics.signal import SignalWatch, has_fixed_length
from slipstream.learner.models.identity import require_same_tokens
from slipstream.learner.models.load import ModelOptions, load_model, vocabulary_of
from slipstream.learner.models.lora import has_adapters
from slipstream.learner.models.optim import build_optimizer
from slipstream.learner.parallel.mesh import World
from slipstream.learner.step_records import StepRecords
from slipstream.learner.trainers.rl.step import TrainStep
from slipstream.learner.trainers.setup import RankSetup, build_efficiency
from slipstream.learner.weights.publisher import WeightPublisher
from slipstream.learner.weights.snapshot import Prober, SnapshotTaker
from slipstream.learner.weights.transports import build_transports
from slipstream.models.device_memory import DeviceMemoryError
from slipstream.models.folder import model_folder

log = get_log("learner.assemble")

PROBE_TOKENS = 32
"""Length of the probe whose log-probs learner and engines compare."""


@dataclass
class RootServices:
    """Connections and trackers of rank 0."""

    buffer: BufferClient
    publisher: WeightPublisher
    reporter: RLReporter
    samples: SampleStore
    records: StepRecords


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
    per_update = config.learner.groups_per_step // config.learner.updates_per_step
    if per_update % world.data_size:
        raise ConfigError(
            f"learner.groups_per_step / learner.updates_per_step = {per_update} must be a multiple of the "
            f"{world.data_size} learner ranks that receive different groups"
        )
    buffer = None
    if world.is_root:
        buffer = BufferClient(config, "learner-feed", incarnation, is_stopping=signals.is_requested)
    reader = GroupReader(config.redis, run=config.run.name)
    return Feed(config, SequenceCost.of_model(path), world, reader, buffer, signals, images)


def build_train_step(config: RunConfig, path: Path, world: World) -> TrainStep:
    """Models and optimizers of a run whose policy starts from `path`; a collective.

    Raises: ConfigError when a model can't be trained, or a plug-in does not exist or takes other options.
    """
    torch.manual_seed(config.run.seed)
    options = ModelOptions.of(config.model, config.learner)
    model = load_model(path, options, world)
    live = replace(options, router_replay=False)  # reference, critic and process rewards are models of their own
    return TrainStep(
        algorithms=config.algorithms,
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
        process_reward=load_process_reward(config.learner.process_reward, path, live, world),
        teachers=load_teachers(
            config.learner.distill, model, path, live, world, temperature=config.rollout.sampling.temperature
        ),
        kl=None if config.learner.kl is None else KlCoefficient(config.learner.kl),
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


def snapshot_taker(
    model: nn.Module,
    weights: WeightsConfig,
    *,
    run: str,
    dtype: torch.dtype,
    device: torch.device,
    publisher: WeightPublisher | None,
) -> SnapshotTaker:
    """The snapshot taker: on the device if the publisher sends from there, else on the host.

    Where the device has no room for two versions, or for one on the way to the host, it does without.

    Args:
        publisher: rank 0's, None on other ranks.

    Raises: ConfigError when the only transport that may be used has no room for two versions.
    """

    on_gpu = any(parameter.is_cuda for parameter in model.parameters())  # not so with learner.offload

    def on(device: torch.device, relay: torch.device | None = None) -> SnapshotTaker:
        return SnapshotTaker(
            model,
            dtype=dtype,
            bucket_bytes=weights.bucket_bytes,
            device=device,
            segments=run if publisher is not None and publisher.in_place else None,
            relay=relay,
            exports=publisher is not None and publisher.exports,
            pinned=publisher is not None and on_gpu,
        )

    host = torch.device("cpu")
    if publisher is None:
        return on(host)
    try:
        snapshots = on(device) if publisher.on_device else on(host, relay=device if on_gpu else None)
    except (torch.OutOfMemoryError, DeviceMemoryError) as error:
        reason = f"{device} has no room for versions of the weights: {error}"
        log.warning("snapshots of the weights don't use the GPU", reason=reason)
        from_device = [transport for transport in publisher.offered if transport.direct or transport.on_device]
        _withdraw(publisher, from_device, weights, reason)
        snapshots = on(host)
    if snapshots.no_shared_memory is not None:
        in_place = [
            transport
            for transport in publisher.offered
            if transport.in_place and not (transport.on_device and device.type == "cuda")
        ]
        _withdraw(publisher, in_place, weights, snapshots.no_shared_memory)
    return snapshots


def _withdraw(publisher: WeightPublisher, transports: list[Transport], weights: WeightsConfig, reason: str) -> None:
    if weights.transport in {transport.key for transport in transports}:
        raise ConfigError(f"weights.transport={weights.transport}: {reason}")
    for transport in transports:
        log.warning("weight transport withdrawn", transport=transport.name, reason=reason)
        publisher.withdraw(transport.name)


def build_prober(engine: EngineConfig, model: nn.Module, world: World) -> Prober:
    """The prober of a policy."""
    # The engine must be able to read the probe, and to generate one token more.
    tokens = min(PROBE_TOKENS, engine.max_model_len - 1)
    return Prober(model, tokens=tokens, vocabulary=vocabulary_of(model), device=world.device)


def open_root_services(setup: RankSetup, incarnation: str, gpus: Sequence[str]) -> RootServices:
    """Rank 0's connections and trackers; `incarnation` is the learner's.

    Args:
        gpus: identity of each rank's GPU, empty for a CPU.

    Raises: ConfigError when an address is taken, or a tracker can't start.
    """
    config = setup.config
    buffer = BufferClient(config, "learner", incarnation, is_stopping=setup.signals.is_requested)
    setup.cleanup.callback(buffer.close)
    publisher = WeightPublisher(config.weights, config.security, build_transports(config), run=config.run.name)
    setup.cleanup.callback(publisher.close)
    trackers = setup.build_trackers()
    assert setup.events is not None, "rank 0 has no event log"
    events, algorithms = setup.events, config.algorithms.values()
    fleet = FleetRecord(config.paths, events, started=setup.started)
    reporter = RLReporter(
        trackers,
        publisher.metrics,
        steps=config.learner.steps,
        dtype=config.model.dtype_here,
        signal=SignalWatch(
            rewarded=any(each.streams.rl for each in algorithms),
            group_relative=all(each.advantage.group_relative and each.streams.rl for each in algorithms),
            fixed_length=has_fixed_length(config.rollout.sampling),
        ),
        eval_reward=config.eval.reward,
        started=setup.started,
        records=RunRecords(build_efficiency(config, setup.world, gpus), events, fleet),
    )
    samples = SampleStore(config.paths.samples, env=config.env.name, trackers=trackers, model=setup.initial_model)
    records = StepRecords(config.paths.steps)
    setup.cleanup.callback(records.close)
    return RootServices(buffer, publisher, reporter, samples, records)
