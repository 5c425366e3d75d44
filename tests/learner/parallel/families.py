"""Four learner ranks that compute log-probs and gradients of families of models, on one mesh after the other.

Arguments: FOLDER PORT CASE…

FOLDER has a model of each family. A case is the name of a mesh and that of a family, with a comma between them. Each
rank leaves CASE-RANK.safetensors there, or CASE-RANK.txt with the reason of a refusal.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes

from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.data.packing import TokenSequence, all_actions, pack
from slipstream.learner.models.load import ModelOptions, load_model
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.mesh import MeshSizes, World, build_expert_mesh, build_mesh, join_world, leave_world

RANKS = 4
LENGTHS = (30, 13, 13, 12, 9, 5, 2)
"""Tokens of the sequences of all ranks; two ranks of a sequence pad their shares."""
MESHES: Mapping[str, Mapping[str, int]] = {
    "dp": {"dp_replicate": 2, "dp_shard": 2}, "cp": {"dp_shard": 2, "cp": 2}, "tp": {"dp_shard": 2, "tp": 2},
    "ep": {"dp_shard": 4, "ep": 2}, "cp+tp": {"cp": 2, "tp": 2}, "cp+ep": {"dp_shard": 2, "cp": 2, "ep": 4},
    "tp+ep": {"dp_shard": 2, "tp": 2, "ep": 4},
}  # fmt: skip
"""Sizes of the meshes, by the kinds of parallelism."""


def scores_and_gradients(folder: Path, world: World) -> dict[str, Tensor]:
    """Log-probs of this rank's sequences, by row, and the gradient of each parameter for those of all ranks."""
    model = load_model(folder, ModelOptions(dtype=torch.float32, attention="segments"), world)
    rng = np.random.default_rng(3)
    rows: list[TokenSequence] = [all_actions(rng.integers(64, size=length)) for length in LENGTHS]
    own = range(world.data_rank, len(rows), world.data_size)
    (batch,) = pack([rows[row] for row in own], token_budget=sum(LENGTHS))
    logprobs = score_actions(model, batch, temperature=0.7).logprobs_A
    row_A = torch.tensor(own)[batch.rows_B[batch.sequence_A]]
    weights = (1 + row_A) * (batch.action_index_A % 3 - 1) / sum(LENGTHS)
    # FSDP averages gradients over the ranks with different rows.
    torch.autograd.backward((logprobs * weights).sum() * world.data_size)
    results = {f"logprobs.{row}": logprobs.detach()[row_A == row] for row in own}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad
        results[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return results


def run_rank(rank: int, folder: Path, cases: Sequence[str]) -> None:
    """Runs the cases."""
    os.environ["RANK"] = str(rank)
    world = join_world()
    for case in cases:
        mesh, family = case.split(", ")
        sizes = MeshSizes(**MESHES[mesh])
        on_mesh = replace(
            world, mesh=build_mesh("cpu", sizes), sizes=sizes, expert_mesh=build_expert_mesh("cpu", sizes)
        )
        try:
            results = scores_and_gradients(folder / family, on_mesh)
        except ConfigError as error:
            (folder / f"{case}-{rank}.txt").write_text(str(error), encoding="utf-8")
        else:
            save_file(
                {name: each.contiguous() for name, each in results.items()}, folder / f"{case}-{rank}.safetensors"
            )
    leave_world()


def main() -> None:
    """Forks the ranks: so torch and transformers are imported only once."""
    _, folder, port, *cases = sys.argv
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    start_processes(run_rank, args=(Path(folder), cases), nprocs=RANKS, start_method="fork")
