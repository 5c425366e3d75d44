"""Learner ranks on several meshes, one after the other, forked from one process.

python -m tests.learner.parallel.meshes FOLDER PORT

Leaves `results-<phase>-<rank>.json` of each phase in FOLDER.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from slipstream.configs import RunConfig
from slipstream.learner.checkpoint import (
    BackgroundCheckpoint,
    TrainState,
    load_checkpoint,
    open_checkpoints,
    save_checkpoint,
)
from slipstream.learner.cli import end_process
from slipstream.learner.models import load
from slipstream.learner.models.load import ModelOptions, load_model
from slipstream.learner.parallel.mesh import World, join_world, leave_world
from slipstream.learner.weights.snapshot import SnapshotTaker
from tests.contract.experts import MODELS as EXPERTS
from tests.learner.recorded import build_train_step, train, weights_of
from tests.learner.trainers.rl.two_ranks import with_learner

STEPS = 2
"""Steps before the checkpoint; one step follows."""
LARGE = "large"
"""Folder of the model whose loading is measured."""
ONE_EXPERT = "one-expert"
"""Folder of a model with fewer experts than ranks."""
Results = dict[str, Any]


def private_bytes() -> int:
    """Memory of this process that is of no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no RssAnon")


@contextmanager
def peak_of_private_bytes(found: list[int]) -> Iterator[None]:
    """Context that appends the growth of the private memory to its peak, sampled by a thread."""
    stop, before = threading.Event(), private_bytes()
    peak = before

    def sample() -> None:
        nonlocal peak
        while not stop.wait(0.001):
            peak = max(peak, private_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    yield
    stop.set()
    thread.join()
    found.append(max(peak, private_bytes()) - before)


def shared_rows(folder: Path, config: RunConfig, world: World) -> Results:
    """Ranks along `tp` receive the same rows, which sums count once."""
    sums = world.sum(torch.tensor([1.0, world.data_rank])).tolist()
    return {"data": [world.data_rank, world.data_size], "sums": sums}


def hsdp(folder: Path, config: RunConfig, world: World) -> Results:
    """Trains, saves a checkpoint and a snapshot."""
    train_step = build_train_step(config, world)
    figures = train(train_step, folder / "groups", range(STEPS), shares=False)
    open_checkpoints(folder / "hsdp", world, keep=1)
    save_checkpoint(folder / "hsdp", train_step.trained, TrainState(step=STEPS), world, keep=1)
    taker = SnapshotTaker(train_step.model, dtype=torch.float32, bucket_bytes=1 << 20, device=world.device)
    snapshot = taker.take(1, evaluate=False, keep=world.is_root)
    if snapshot is not None:
        save_file({name: tensor.clone() for name, tensor in snapshot.named_tensors()}, folder / "snapshot.safetensors")
    return {"figures": figures}


def resume(folder: Path, config: RunConfig, world: World) -> Results:
    """Continues the checkpoints of other meshes, and one that is written during the step after it."""
    found: Results = {}
    for saved in ("hsdp", "one", "background"):
        train_step = build_train_step(config, world)
        assert load_checkpoint(folder / saved, train_step.trained, world, TrainState) == TrainState(step=STEPS)
        writing = None
        if saved == "one":
            background, group = folder / "background", dist.new_group(backend="gloo")
            open_checkpoints(background, world, keep=1)
            state = TrainState(step=STEPS)
            writing = BackgroundCheckpoint(background, train_step.trained, state, world, keep=1, group=group)
        found[saved] = train(train_step, folder / "groups", [STEPS], shares=False)
        if writing is not None:
            writing.finish()
    return found


def load_large(folder: Path, config: RunConfig, world: World) -> Results:
    """Loads a model of about 150 MB and takes a snapshot of it, and measures the private memory of both."""
    peaks: list[int] = []
    build_train_step(config, world)  # torch and transformers import much at the first use
    # Forward passes, such as those of the checks, gather some layers at a time, or the head.
    checks = [patch.object(load, name) for name in ("check_packing", "check_head", "_may_share")]
    with peak_of_private_bytes(peaks), checks[0], checks[1], checks[2]:
        model = load_model(folder / LARGE, ModelOptions(dtype=torch.float32, attention="segments"), world)
    taker = SnapshotTaker(model, dtype=torch.bfloat16, bucket_bytes=1 << 20, device=world.device)
    with peak_of_private_bytes(peaks):
        taker.take(1, evaluate=False, keep=world.is_root)
    sizes = [parameter.numel() for parameter in model.parameters()]
    return {"load": peaks[0], "snapshot": peaks[1], "whole": 4 * sum(sizes), "largest": 4 * max(sizes)}


def load_experts(folder: Path, config: RunConfig, world: World) -> Results:
    """Loads models with stacked experts, of which each rank reads its own; names of tensors that are not equal."""
    differ = []
    for kind in (*EXPERTS, ONE_EXPERT):
        model = load_model(folder / kind, ModelOptions(dtype=torch.bfloat16, attention="segments"), world)
        wanted = dict(AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.float32).named_parameters())
        found = weights_of(model)
        assert found.keys() == wanted.keys()
        differ += [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]
    return {"differ": differ}


Phase = Callable[[Path, RunConfig, World], Results]
PHASES: dict[str, tuple[Phase, int, Mapping[str, int]]] = {
    "load_large": (load_large, 2, {}), "load_experts": (load_experts, 2, {}),
    "shared_rows": (shared_rows, 4, {"tp": 2}), "hsdp": (hsdp, 4, {"dp_replicate": 2}), "resume": (resume, 2, {}),
}  # fmt: skip
"""What each phase runs, on how many ranks, on which mesh."""


def run_rank(name: str, folder: Path, rank: int, port: int) -> None:
    """One rank of a phase."""
    phase, ranks, parallel = PHASES[name]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    config = with_learner(RunConfig.model_validate_json((folder / "config.json").read_text()), {"parallel": parallel})
    world = join_world(config.learner.parallel)
    results = phase(folder, config, world)
    (folder / f"results-{name}-{rank}.json").write_text(json.dumps(results))
    leave_world()


def main(folder: Path, port: int) -> None:
    """Runs all phases."""
    torch.set_num_threads(1)  # before the forks: threads do not survive them
    for name, (_, ranks, _) in PHASES.items():
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    run_rank(name, folder, rank, port)
                    code = 0
                finally:
                    end_process(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"{name}: {codes}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
