"""Tiny measurements of whole runs, in real processes: the demo without TRL, and two bounds of staleness."""

from pathlib import Path

import pytest

from benchmarks.__main__ import command
from benchmarks.demo import DEMO, trl_task
from benchmarks.pipeline import Speed, figures_of
from slipstream.configs.load import load_config
from slipstream.configs.runtime.errors import ConfigError
from tests.benchmarks.conftest import Measure, with_goals

DEMO_CHANGES = (
    "learner.steps=12 learner.groups_per_step=4 learner.optimizer.warmup_steps=0 "
    "rollout.engine.name=hf rollout.engine.kv_cache_bytes=null"
)
PIPELINE = "--steps 2 --groups-per-step 1 --staleness 1 --engines hf"


@pytest.mark.usefixtures("forked_workers")
def test_demo_without_trl(measured: Measure) -> None:
    value = measured("demo", f"--rounds 1 --set {DEMO_CHANGES}")["value"]
    processes = {"redis", "buffer", "rollout", "learner"}
    assert value.keys() == {"slipstream: a step", "score at the end, mean", "CPU time of a step"} | processes
    assert value["slipstream: a step"] > 0
    assert 0 <= value["score at the end, mean"] <= 1
    assert value["CPU time of a step"] == pytest.approx(sum(value[name] for name in processes))


@pytest.mark.parametrize(
    ("part", "option"), [("demo", "--trl-python"), ("learner", "--trl-python"), ("pipeline", "--trl")]
)
def test_absent_interpreter_of_trl_is_refused(tmp_path: Path, part: str, option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        command([part, option, str(tmp_path / "absent")])


def test_trl_has_the_demos_tasks_and_settings() -> None:
    task = trl_task(load_config(DEMO, ["learner.steps=70", "learner.optimizer.lr=0.5"]))
    assert len(task["train"]) + len(task["eval"]) == 1000
    assert task["settings"]["max_steps"] == 70
    assert task["settings"]["learning_rate"] == 0.5
    assert task["settings"]["per_device_train_batch_size"] == 256


@pytest.mark.usefixtures("forked_workers")
def test_pipeline(measured: Measure) -> None:
    record = measured("pipeline", PIPELINE)
    assert with_goals(record) == {"of the limit, 1"}
    ((synchronous,), (stale,)) = record["details"].values()
    assert synchronous["staleness"] == 0
    assert stale["staleness"] > 0


def test_limit_is_the_longer_phase() -> None:
    runs = {
        0: [Speed(tokens_per_s=100, step_s=4, wait_s=1, staleness=0, generator_idle=0)],
        1: [Speed(tokens_per_s=120, step_s=10 / 3, wait_s=0.3, staleness=1, generator_idle=0)],
    }
    values = {figure.name.strip(): figure.value for figure in figures_of(runs)}
    assert values["limit, (G + T) / max(G, T) times that"] == pytest.approx(400 / 3)
    assert values["of the limit, 1"] == pytest.approx(0.9)
