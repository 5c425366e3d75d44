"""Space on the disk of a run's folder."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from slipstream.configs import RunConfig
from slipstream.tools.launch.disk import disk_problems, parameters
from tests.tools.run_command import demo_config

COUNT = 1_000_000
CHECKPOINT, MODEL = 12 * COUNT, 4 * COUNT


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": np.zeros((500, 1000), dtype=np.float16)}, folder / "model-1.safetensors")
    save_file({"b": np.zeros((500_000,), dtype=np.float16)}, folder / "model-2.safetensors")
    return folder


def config_of(folder: Path, model: Path, *overrides: str) -> RunConfig:
    return demo_config(folder, f"model={{path: {model}, dtype: float32}}", "learner.checkpoint.keep=2", *overrides)


def test_parameters_are_counted_over_all_files(model: Path) -> None:
    assert parameters(model) == COUNT


@pytest.mark.parametrize(
    ("free", "overrides", "saved", "refused"),
    [
        (3 * CHECKPOINT + MODEL, [], 0, False),
        (3 * CHECKPOINT + MODEL - 1, [], 0, True),
        (2 * CHECKPOINT + MODEL, [], 1, False),
        (2 * CHECKPOINT + MODEL, ["learner.checkpoint.keep=1"], 0, False),
        (3 * CHECKPOINT + MODEL, ["learner.advantage=gae", "learner.critic={}"], 0, True),
        (3 * CHECKPOINT + MODEL, ["learner.advantage=prime", "learner.process_reward={}"], 0, True),
        (0, ["model.lora={rank: 4}"], 0, False),
        (0, ["model={build: digits}"], 0, False),
    ],
    ids=["fits", "too small", "continued", "fewer", "critic", "process reward", "adapters", "built"],
)
def test_run_that_would_fill_its_disk_is_refused(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    overrides: list[str],
    saved: int,
    refused: bool,
) -> None:
    config = config_of(tmp_path, model, *overrides) if "build" not in str(overrides) else demo_config(tmp_path)
    for step in range(saved):
        (config.paths.checkpoints / f"step-{step + 1}").mkdir(parents=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    problems = disk_problems(config)
    assert len(problems) == refused
    assert all("run.dir" in problem and "learner.checkpoint.keep" in problem for problem in problems)
