"""Fixtures of the learner's tests: one thread, one rank, one tiny model."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.configs import RunConfig
from slipstream.learner.parallel.mesh import World, join_world, leave_world
from slipstream.models.digits import build_digits_model
from tests.learner.recorded import RECORDED_STEPS, record, run_config, vivid

torch.set_num_threads(1)
# Gloo asks the resolver for this host's address otherwise, which a sandbox may not have.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(scope="session")
def digits_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the demo's model, its matrices ten times as large: at first its attention hardly matters."""
    folder = tmp_path_factory.mktemp("model") / "digits"
    build_digits_model(folder, seed=1)
    vivid(folder)
    return folder


@pytest.fixture(scope="session")
def groups(digits_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The frames of the recorded steps' groups."""
    folder = tmp_path_factory.mktemp("recorded")
    record(folder / "groups", RECORDED_STEPS, run_config(digits_model, folder))
    return folder / "groups"


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
