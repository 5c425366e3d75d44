"""A small `slipstream bench demo`, without TRL."""

from pathlib import Path

import pytest

from slipstream.configs.load import load_config
from slipstream.configs.runtime.errors import ConfigError
from benchmarks import demo
from benchmarks.__main__ import command
from benchmarks.demo import trl_task
from benchmarks.staleness import DEMO
from tests.benchmarks.conftest import measured

SMALL = ["--rounds", "1", "--steps", "12", "--set", "rollout.engine.name=hf", "rollout.engine.kv_cache_bytes=null"]


@pytest.mark.usefixtures("nothing_left")
def test_all_figures_are_saved_and_trl_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "DEFAULT_PYTHON", tmp_path / "absent")
    record = measured("demo", [*SMALL, "learner.groups_per_step=4"], tmp_path / "runs")
    assert "skipped" in capsys.readouterr().out.splitlines()[0]
    values = {figure["name"].strip(): figure["value"] for figure in record["figures"]}
    assert values.keys() == {
        "slipstream: a step", "score at the end, mean", "CPU time of a step", "redis", "buffer", "rollout", "learner",
    }  # fmt: skip
    assert values["slipstream: a step"] > 0
    assert 0 <= values["score at the end, mean"] <= 1
    assert values["CPU time of a step"] == pytest.approx(
        sum(values[name] for name in ("redis", "buffer", "rollout", "learner"))
    )


def test_absent_interpreter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--trl-python"):
        command(["demo", "--trl-python", str(tmp_path / "absent")])


def test_trl_has_the_demos_tasks_and_settings() -> None:
    config = load_config(DEMO, ["learner.steps=7", "learner.optimizer.lr=0.5"])
    task = trl_task(config)
    assert len(task["train"]) + len(task["eval"]) == 1000
    assert task["settings"]["max_steps"] == 7
    assert task["settings"]["learning_rate"] == 0.5
    assert task["settings"]["per_device_train_batch_size"] == 256
