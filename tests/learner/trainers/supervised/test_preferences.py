"""Trainers on preferences: first losses by hand, learning, resume, two ranks, files that others load."""

import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.configs.load import load_config
from slipstream.learner.parallel.mesh import World
from tests.conftest import free_port
from tests.learner.trainers.supervised.preferences import (
    STEPS,
    reversal_pairs,
    run_trainer,
    steps_of,
    write_rows,
    write_run,
)

ROOT = Path(__file__).parents[4]
LOSSES: dict[str, tuple[Mapping[str, Any], float | None]] = {
    "dpo": ({"name": "dpo", "loss": "dpo"}, math.log(2)),
    "cdpo": ({"name": "dpo", "loss": {"name": "dpo", "label_smoothing": 0.1}}, math.log(2)),
    "ipo": ({"name": "dpo", "loss": {"name": "ipo", "beta": 0.25}}, 4.0),
    "simpo": ({"name": "dpo", "loss": "simpo"}, None),
    "kto": ({"name": "dpo", "loss": "kto"}, 0.5),
    "reward_model": ({"name": "reward_model", "margin": 0.0}, math.log(2)),
    "margin": ({"name": "reward_model"}, math.log(1 + math.exp(0.5))),
}
"""Trainers, and their losses before the first update: the policy is the reference, and a new head gives 0."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "pairs.jsonl", reversal_pairs(24))


@pytest.mark.parametrize("name", LOSSES)
def test_first_loss_is_known_and_falls(name: str, rows: Path, digits_model: Path, world: World, tmp_path: Path) -> None:
    trainer, first = LOSSES[name]
    file = write_run(tmp_path, name, digits_model, {**trainer, "data": str(rows)})
    steps = steps_of(run_trainer(file, world).paths)
    if first is not None:
        assert steps[1]["loss"] == pytest.approx(first, abs=1e-5)
    assert steps[STEPS]["loss"] < steps[1]["loss"]
    assert steps[STEPS]["accuracy"] > 0.5
    assert steps[1]["terms"] == (16 if name == "kto" else 8)


@pytest.mark.parametrize("name", ["kto", "margin"])
def test_resumed_training_is_bit_equal(name: str, rows: Path, digits_model: Path, world: World, tmp_path: Path) -> None:
    trainer = {**LOSSES[name][0], "data": str(rows)}
    whole, cut = (write_run(tmp_path, run, digits_model, trainer) for run in ("whole", "cut"))
    wanted = load_file(run_trainer(whole, world).paths.export / "model.safetensors")
    run_trainer(cut, world, stop_after=3)
    found = load_file(run_trainer(cut, world).paths.export / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[tensor], wanted[tensor]) for tensor in wanted)


def test_two_ranks_are_as_one(rows: Path, digits_model: Path, world: World, tmp_path: Path) -> None:
    trainers = {name: {**LOSSES[name][0], "data": str(rows)} for name in ("dpo", "kto", "margin")}
    alone = {name: write_run(tmp_path, f"{name}-alone", digits_model, trainer) for name, trainer in trainers.items()}
    together = [write_run(tmp_path, f"{name}-together", digits_model, trainer) for name, trainer in trainers.items()]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}",
        "-m", "tests.learner.trainers.supervised.preferences", *map(str, together),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for file, of_two in zip(alone.values(), together, strict=True):
        one, two = (steps_of(paths) for paths in (run_trainer(file, world).paths, load_config(of_two).paths))
        for step in one:
            # In the first step the policy is its own reference, and which answer is preferred is a matter of rounding.
            for metric in ("loss", "grad_norm", *(["accuracy"] if step > 1 else [])):
                assert two[step][metric] == pytest.approx(one[step][metric], rel=1e-3, abs=1e-5), (step, metric)
