"""Two learner ranks that train on recorded groups, save a checkpoint, and export the model.

Arguments: FOLDER PORT
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec, patch

import torch
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from slipstream.buffer.client import BufferClient
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import DeadlineError, SlipstreamError
from slipstream.configs.runtime.signals import GracefulStop
from slipstream.configs.schema.model import LoraConfig
from slipstream.learner.algorithms.advantages.base import AdvantageInputs
from slipstream.learner.checkpoint import (
    TrainState,
    load_checkpoint,
    open_checkpoints,
    save_checkpoint,
)
from slipstream.learner.data.balance import SequenceCost
from slipstream.learner.data.buffer_feed import Feed
from slipstream.learner.data.packing import MicroBatch
from slipstream.learner.export import export_model
from slipstream.learner.metrics.rl_reporter import RLReporter
from slipstream.learner.metrics.samples import SampleStore
from slipstream.learner.parallel.mesh import World, join_world, leave_world
from slipstream.learner.step_records import StepRecords
from slipstream.learner.trainers import assemble
from slipstream.learner.trainers.rl.parts import RootServices
from slipstream.learner.trainers.rl.step import TrainStep
from slipstream.learner.trainers.rl.trainer import RLTrainer
from slipstream.learner.weights.publisher import WeightPublisher
from slipstream.learner.weights.snapshot import SnapshotTaker
from tests.full_disk import files_of_at_most
from tests.learner.recorded import build_train_step, mixed_config, preparer_of, prober_of, recorded_step, train
from tests.vision import gradient_norms

STEPS = 3
CRITIC = {"optimizer": {"lr": 3e-3, "warmup_steps": 0}}
VARIANTS: dict[str, dict[str, Any]] = {
    "critic": {"advantage": "gae", "critic": CRITIC},
    "process_reward": {"advantage": "prime", "process_reward": {"beta": 0.5, "optimizer": CRITIC["optimizer"]}},
    "online_dpo": {
        "advantage": "online_dpo",
        "kl": {"coefficient": 0.0},
        "updates_per_step": 1,
        "loss": {"name": "reinforce", "aggregation": "seq-mean-token-sum"},
    },
    "sppo": {"advantage": "win_rate", "loss": {"name": "sppo", "eta": 5.0}},
    "whitened": {"advantage": "reinforce_plus_plus"},
    "reference": {"kl": {"coefficient": 0.1, "place": "reward", "estimator": "k1"}},
    "correction": {"correction": {"normalise": True, "second_moment": 0.5, "veto": 1e-4}},
    "aggregation": {"loss": {"aggregation": "seq-mean-token-mean", "entropy_bonus": 0.01}},
    "lora": {"kl": {"coefficient": 0.1, "place": "reward", "estimator": "k1"}},
    "muon": {"optimizer": {"name": "muon", "lr": 1e-3, "warmup_steps": 0}},
    "selective": {"activation_checkpointing": "selective"},
    "average": {
        "distill": {"teachers": [{"weights": "average", "average_rate": 0.3}], "loss": "jsd"},
        "streams": {"ref_kl": 1},
    },
    "teacher": {"distill": {"teachers": [{}], "loss": "advantage"}, "streams": {"ref_kl": 1}},
    "offload": {"offload": True, "activation_checkpointing": "full"},
}
"""Further settings of `learner` with the same result on any number of ranks; two steps of each."""
LORA = {"rank": 4, "alpha": 16}
OPTIMIZERS = ["muon", *(["adamw_8bit"] if find_spec("torchao") else [])]
"""Those that resume from a checkpoint of two ranks."""


STREAMS = {"streams": {"rl": 1.0, "ce": 0.3, "ref_kl": 0.2}, "kl": {"coefficient": 0.0}}
OF_ENVS = {
    "one": {"advantage": "reinforce_plus_plus_baseline", "correction": {"normalise": True, "second_moment": 0.5}},
    "two": {
        "advantage": "gdpo",
        "loss": {"name": "cispo", "aggregation": "seq-mean-token-sum"},
        "streams": {"ce": 0.1},
    },
}
"""Streams, and algorithms of the envs of a mixture; all groups of one of them are on one rank."""
REPLAY = {"router_replay": True, "activation_checkpointing": "full"}
"""Settings of `learner` for a mixture of experts."""


def with_learner(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The run with other settings of `learner`."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    return RunConfig.model_validate(tree | {"learner": tree["learner"] | settings})


def variant_of(config: RunConfig, name: str) -> RunConfig:
    """The run with the settings of one of `VARIANTS`."""
    varied = with_learner(config, VARIANTS[name])
    lora = LoraConfig.model_validate(LORA) if name == "lora" else None
    return varied.model_copy(update={"model": varied.model.model_copy(update={"lora": lora})})


def with_model(config: RunConfig, path: Path) -> RunConfig:
    """The run with another model."""
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def renamed(name: str, config: RunConfig) -> RunConfig:
    """The run under another name."""
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def refusal(call: Callable[[], object]) -> str:
    """The error of a call."""
    try:
        call()
    except SlipstreamError as error:
        return str(error)
    return "no error"


def refusals(folder: Path, saved: Path, train_step: TrainStep) -> dict[str, str]:
    """Errors of this rank when the other one fails, and when the ranks have different folders."""
    world, full = train_step.world, folder / "full"
    own = folder / f"of-rank-{world.rank}"
    with files_of_at_most(1_000_000_000 if world.is_root else 10_000):
        no_room = refusal(lambda: save_checkpoint(full, train_step.trained, TrainState(step=1), world, keep=1))
    return {
        "no room": no_room,
        "folders apart": refusal(lambda: open_checkpoints(own, world, keep=1)),
        "checkpoints apart": refusal(
            lambda: load_checkpoint(saved if world.is_root else own, train_step.trained, world, TrainState)
        ),
    }


def refusal_of_other_settings(config: RunConfig, world: World) -> str:
    """The error of ranks with different learning rates."""
    settings = {"optimizer": {"lr": 1e-3 if world.is_root else 1e-9}}
    cleanup = ExitStack()  # never closed: the ranks go on
    with patch.object(assemble, "join_world", return_value=world):
        return refusal(
            lambda: assemble.assemble(
                RLTrainer, with_learner(config, settings), started=0.0, cleanup=cleanup, signals=GracefulStop()
            )
        )


def figures_of_resumed(folder: Path, config: RunConfig, world: World) -> list[list[dict[str, float]]]:
    """The second step, of a training that goes on and of one that resumes from a checkpoint after the first."""
    train_step, resumed = build_train_step(config, world), build_train_step(config, world)
    train(train_step, folder / "groups", [0])
    open_checkpoints(config.paths.checkpoints, world, keep=1)
    save_checkpoint(config.paths.checkpoints, train_step.trained, TrainState(step=1), world, keep=1)
    load_checkpoint(config.paths.checkpoints, resumed.trained, world, TrainState)
    return [train(each, folder / "groups", [1, 2]) for each in (train_step, resumed)]


@contextmanager
def object_collectives_forbidden() -> Iterator[None]:
    """Context in which torch's collectives that unpickle what another rank has sent raise an error."""
    names = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
    with ExitStack() as patches:
        for name in names:
            patches.enter_context(patch(f"torch.distributed.{name}", side_effect=AssertionError(name)))
        yield


def lone_loop(folder: Path, config: RunConfig, world: World) -> RLTrainer:
    """A training on the first recorded steps, without buffer and rollout servers."""
    assert config.model.path is not None, "recorded runs have a model folder"
    world.store.set("version", "0")
    train_step, feed = build_train_step(config, world), create_autospec(Feed, instance=True)
    feed.take.side_effect = (
        recorded_step(folder / "groups", step, config, rank=world.rank, world_size=world.size) for step in range(STEPS)
    )
    snapshots = SnapshotTaker(train_step.model, dtype=torch.float32, bucket_bytes=1 << 20, device=world.device)
    return RLTrainer(
        config=config,
        initial_model=config.model.path,
        world=world,
        reporter=None,
        train_step=train_step,
        feed=feed,
        read_groups=lambda ids: [],
        snapshots=snapshots,
        prober=prober_of(train_step),
        root=None,
    )


def sums_of_advantage(folder: Path, config: RunConfig, world: World) -> list[list[float]]:
    """An argument of `AdvantageInputs.total`, as it is after the call, and the sum."""
    found: list[list[float]] = []

    def advantage(inputs: AdvantageInputs) -> Tensor:
        own = torch.tensor([[1.0, world.rank]]).expand(2, 2).T  # not contiguous, which NCCL refuses
        summed = inputs.total(own)
        found.extend((own.flatten().tolist(), summed.flatten().tolist()))
        return torch.zeros_like(inputs.mask_BT)

    data = recorded_step(folder / "groups", 0, config, rank=world.rank, world_size=world.size)
    prepare = preparer_of(build_train_step(config, world), advantage)
    without_passes: list[list[MicroBatch]] = [[] for _ in data.updates]
    prepare(data.rows, without_passes, consuming_version=0, unpublished_steps=0, kl_coefficient=0.0)
    return found


def exit_code_after_signal_to_rank_1(folder: Path, config: RunConfig, world: World) -> object:
    """The exit code when only rank 1 receives a stop signal, in the first step."""
    loop = lone_loop(folder, config, world)
    train = loop.train_step.run

    def receive_signal(*given: Any, **also: Any) -> Any:
        loop.signals.number = signal.SIGTERM * world.rank
        return train(*given, **also)

    with patch.object(loop.train_step, "run", receive_signal):
        return exit_code(loop)


def exit_code(loop: RLTrainer) -> object:
    """The exit code of a training."""
    try:
        loop.run()
    except SystemExit as end:
        return end.code
    return "no exit"


def exit_code_while_buffer_is_away(folder: Path, config: RunConfig, world: World) -> object:
    """The exit code when only rank 0 receives a stop signal, while the buffer is away."""
    loop = lone_loop(folder, config, world)
    if world.is_root:
        buffer = create_autospec(BufferClient, instance=True)
        buffer.hello.return_value = m.State(request=0, version=0, counts=m.LedgerCounts(), servers=[], evals=[])

        def fail_after_signal(step: int) -> None:
            loop.signals.number = signal.SIGTERM
            raise DeadlineError("the buffer is away")

        buffer.trained.side_effect = buffer.checkpointed.side_effect = fail_after_signal
        publisher, reporter = (create_autospec(kind, instance=True) for kind in (WeightPublisher, RLReporter))
        samples, records = SampleStore(config.paths.samples), create_autospec(StepRecords, instance=True)
        loop.root = RootServices(buffer, publisher, reporter, samples, records)
        loop.reporter = reporter
    return exit_code(loop)


def run_rank(rank: int, folder: Path) -> None:
    """Trains, and fails in several ways.

    Leaves `figures.json`, `variants.json`, `results-<rank>.json`, `exported/` and the run's folder in `folder`.
    """
    os.environ["RANK"] = str(rank)
    config = RunConfig.model_validate_json((folder / "config.json").read_text(encoding="utf-8"))
    world = join_world()
    settings_apart = refusal_of_other_settings(config, world)
    with object_collectives_forbidden():
        train_step = build_train_step(config, world)
        figures = train(train_step, folder / "groups", range(STEPS))
    saved = config.paths.checkpoints
    open_checkpoints(saved, world, keep=1)
    save_checkpoint(saved, train_step.trained, TrainState(step=STEPS), world, keep=1)
    assert config.model.path is not None, "recorded runs have a model folder"
    export_model(config.model.path, folder / "exported", train_step.model, world, dtype=torch.float32)
    if world.is_root:
        (folder / "figures.json").write_text(json.dumps(figures), encoding="utf-8")
    results: dict[str, object] = {**refusals(folder, saved, train_step), "settings apart": settings_apart}
    value = {"rank": world.rank, "text": "x" * (1 + 1000 * world.rank), "none": None}
    results["checksum"] = train_step.checksum()
    results["exchanged"] = [world.gather(value), world.from_root(value), world.largest(world.rank)]
    for name in ("groups", "nowhere", "changed"):
        path = config.model.path if world.is_root and name != "groups" else folder / name
        results[f"model in {name}"] = refusal(partial(build_train_step, with_model(config, path), world))
    ruinous = with_learner(config, {"optimizer": {"lr": 1e30, "warmup_steps": 0}})
    results["ruined"] = refusal(lone_loop(folder, renamed("ruined", ruinous), world).run)
    for name in OPTIMIZERS:
        chosen = with_learner(config, {"optimizer": {"name": name, "lr": 1e-3, "warmup_steps": 0}})
        results[f"resumed {name}"] = figures_of_resumed(folder, renamed(name, chosen), world)
    results["signal"] = exit_code_after_signal_to_rank_1(folder, renamed("signal", config), world)
    adapted = build_train_step(variant_of(config, "lora"), world)
    train(adapted, folder / "groups", range(1))
    save_checkpoint(folder / "lora", adapted.trained, TrainState(step=1), world, keep=1)
    export_model(config.model.path, folder / "adapter", adapted.model, world, dtype=torch.float32, adapter=True)
    results["away"] = exit_code_while_buffer_is_away(folder, renamed("away", config), world)
    results["advantage's sums"] = sums_of_advantage(folder, config, world)
    results["balanced"] = train(
        build_train_step(config, world), folder / "groups", range(STEPS), SequenceCost(even_at=8)
    )
    results["vision"] = gradient_norms(folder / "vision", world)
    (folder / f"results-{world.rank}.json").write_text(json.dumps(results), encoding="utf-8")
    variants = {
        name: train(build_train_step(variant_of(config, name), world), folder / "groups", range(2)) for name in VARIANTS
    }
    replay = with_model(with_learner(config, REPLAY), folder / "experts")
    variants["experts"] = train(build_train_step(replay, world), folder / "groups-with-experts", range(2))
    of_envs = mixed_config(with_learner(config, STREAMS), OF_ENVS)
    variants["envs"] = train(build_train_step(of_envs, world), folder / "groups-of-envs", range(2))
    if world.is_root:
        (folder / "variants.json").write_text(json.dumps(variants), encoding="utf-8")
    leave_world()


def main() -> None:
    """Forks the ranks: so torch and transformers are imported only once."""
    _, folder, port = sys.argv
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    start_processes(run_rank, args=(Path(folder),), nprocs=2, start_method="fork")
