"""What tests of the learner share: one thread, one rank, one tiny model."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.configs import RunConfig
from slipstream.configs.tiny_model import build_digits_model
from slipstream.learner.distributed import World, join_world, leave_world
from tests.conftest import free_port
from tests.learner.recorded import RECORDED_STEPS, record, run_config, vivid

ROOT = Path(__file__).parents[2]
torch.set_num_threads(1)
# Gloo asks the resolver for this host's address otherwise, which a sandbox may not have.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


@dataclass(frozen=True)
class TwoRanks:
    """What a torchrun job of two ranks left behind."""

    config: RunConfig
    folder: Path
    """`figures.json` of rank 0, `exported/`, and the run's folder with a checkpoint."""


@pytest.fixture(scope="session")
def digits_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the demo's model, its matrices ten times as large: at first its attention hardly matters."""
    folder = tmp_path_factory.mktemp("model") / "digits"
    build_digits_model(folder, seed=1)
    vivid(folder)
    return folder


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A process group of this process alone."""
    joined = join_world()
    yield joined
    leave_world()


@pytest.fixture
def make_config(digits_model: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """A run's configuration; keyword arguments replace settings of `learner`."""

    def make(**learner: Any) -> RunConfig:
        return run_config(digits_model, tmp_path, **learner)

    return make


@pytest.fixture(scope="session")
def two_ranks(digits_model: Path, tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    """Two learner ranks under torchrun have trained on recorded groups."""
    folder = tmp_path_factory.mktemp("two_ranks")
    config = run_config(digits_model, folder)
    record(folder / "groups", RECORDED_STEPS, config)
    (folder / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    command += [str(free_port()), "--module", "tests.learner.two_ranks", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return TwoRanks(config, folder)
