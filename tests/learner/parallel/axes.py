"""Four learner ranks that train tiny models on recorded groups, on one mesh after the other.

Arguments: FOLDER PORT
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes

from slipstream.configs import RunConfig
from slipstream.learner.checkpoint import TrainState, open_checkpoints, save_checkpoint
from slipstream.learner.data.packing import all_actions, pack
from slipstream.learner.models.optim import build_optimizer
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.mesh import MeshSizes, World, build_expert_mesh, build_mesh, join_world, leave_world
from slipstream.learner.trainers.rl import parts
from slipstream.learner.trainers.rl.step import TrainStep
from slipstream.learner.weights.snapshot import SnapshotTaker
from tests.learner.recorded import VOCABULARY, build_train_step, train
from tests.learner.trainers.rl.two_ranks import with_learner

RANKS = 4
STEPS = 1
MUON: dict[str, Any] = {"optimizer": {"name": "muon", "lr": 0.01, "warmup_steps": 0, "final_lr_fraction": 1.0}}
CRITIC: dict[str, Any] = {"advantage": "gae", "critic": {"optimizer": {"lr": 0.1, "warmup_steps": 0}}}
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "cp4": ("dense", {"cp": 4}, {}), "dp2 cp2 critic": ("dense", {"cp": 2}, CRITIC),
    "cp2 tp2": ("dense", {"cp": 2, "tp": 2}, {}), "cp2 ep2": ("experts", {"cp": 2, "ep": 2}, {}),
    "tp2 ep4": ("experts", {"tp": 2, "ep": 4}, {}),
    "replicate2 cp2 gspo": ("dense", {"dp_replicate": 2, "cp": 2}, {"loss": "gspo"}),
    "dp2 tp2 muon": ("dense", {"tp": 2}, MUON), "dp2 ep2 muon": ("experts", {"ep": 2}, MUON),
}  # fmt: skip
"""Model, sizes of the mesh and further settings of `learner`, by name."""
SAVED = ("dp2 tp2 muon", "cp2 ep2")
"""Cases that save a checkpoint."""


@contextmanager
def plain_descent() -> Iterator[None]:
    """Context in which AdamW is SGD: then weights differ from those of one rank as gradients do.

    Muon stays, with its matrix products in fp32: it makes all singular values of a gradient alike, and so the rounding
    of bf16 in those that are nearly 0 as large as the others.
    """

    def build(model: torch.nn.Module, config: Any) -> torch.optim.Optimizer:
        return (
            build_optimizer(model, config) if config.name == "muon" else torch.optim.SGD(model.parameters(), config.lr)
        )

    with (
        patch.object(parts, "build_optimizer", build),
        patch("slipstream.learner.algorithms.critic.build_optimizer", build),
        patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone),
    ):
        yield


def trained(config: RunConfig, groups: Path, world: World) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Figures of the steps, and the published weights on rank 0."""
    with plain_descent():
        train_step = build_train_step(config, world)
        figures = train(train_step, groups, range(STEPS))
    return figures, published(train_step)


def published(train_step: TrainStep) -> dict[str, torch.Tensor]:
    """The weights as servers get them; empty on ranks other than 0."""
    world = train_step.world
    taker = SnapshotTaker(train_step.model, dtype=torch.float32, bucket_bytes=1 << 20, device=world.device)
    snapshot = taker.take(1, evaluate=False, keep=world.is_root)
    return {} if snapshot is None else dict(snapshot.named_tensors())


def case_config(folder: Path, case: str) -> RunConfig:
    """The configuration of a case."""
    model, parallel, settings = CASES[case]
    config = RunConfig.model_validate_json((folder / "config.json").read_text(encoding="utf-8"))
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": folder / model})})
    return with_learner(config, {"parallel": parallel, **settings})


def on_mesh(config: RunConfig, world: World) -> World:
    """The same ranks on the configured mesh."""
    sizes = MeshSizes.of(config.learner.parallel, ranks=world.size)
    return replace(world, mesh=build_mesh("cpu", sizes), sizes=sizes, expert_mesh=build_expert_mesh("cpu", sizes))


def saved_bytes(train_step: TrainStep) -> int:
    """Memory of what a pass over many tokens keeps for its backward pass."""
    storages: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    sequences = [all_actions(np.arange(60) % VOCABULARY)] * 30
    (batch,) = pack(sequences, token_budget=60 * 30)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        scores = score_actions(train_step.model, batch, temperature=1.0)
    torch.autograd.backward(scores.logprobs_A.sum())
    return sum(storages.values())


def save(case: str, folder: Path, config: RunConfig, world: World) -> None:
    """Trains a step with AdamW and saves a checkpoint."""
    train_step = build_train_step(config, world)
    train(train_step, folder / "groups", [0])
    target = folder / "saved" / case
    open_checkpoints(target, world, keep=1)
    save_checkpoint(target, train_step.trained, TrainState(step=1), world, keep=1)


def run_rank(rank: int, folder: Path) -> None:
    """Runs all cases; rank 0 leaves the figures and the published weights of each."""
    os.environ["RANK"] = str(rank)
    world = join_world()
    for case in CASES:
        config = case_config(folder, case)
        mesh = on_mesh(config, world)
        figures, weights = trained(config, folder / "groups", mesh)
        if world.is_root:
            (folder / f"{case}.json").write_text(json.dumps(figures), encoding="utf-8")
            save_file({name: tensor.clone() for name, tensor in weights.items()}, folder / f"{case}.safetensors")
        if case in SAVED:
            save(case, folder, config, mesh)
        if case == "cp4":
            found = saved_bytes(build_train_step(config, mesh))
            (folder / f"bytes-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    leave_world()


def main() -> None:
    """Forks the ranks: so torch and transformers are imported only once."""
    _, folder, port = sys.argv
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    start_processes(run_rank, args=(Path(folder),), nprocs=RANKS, start_method="fork")
