"""A whole run with vLLM, Valkey and FSDP2: its learner is killed and returns, it is stopped and finished."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.learner.metrics.catalog import CATALOG
from slipstream.learner.metrics.samples import read_samples
from tests.learner.metrics.test_catalog import keys as metric_names
from tests.pipeline.conftest import DEADLINE_S, Pipeline

LEARNER = "slipstream.learner.cli"
STEPS = 80
OVERRIDES = (
    f"learner.steps={STEPS}", "learner.checkpoint.every_steps=10", "eval.every_steps=40",
    "learner.optimizer.lr=1.0e-3",  # faster than the demo's: there are few steps
)  # fmt: skip
FIRST_STEPS = (11, 21, 31, 41)
"""Possible first steps after a learner was killed: those after a checkpoint."""
# The run itself, in the set-up of the tests, takes a minute.
pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Interrupted:
    """A `slipstream up` that lost its learner, continued, and was stopped by Ctrl-C."""

    code: int
    output: str
    left: list[psutil.Process]
    """Its processes that still run."""
    steps_before_kill: int
    """Number of steps reported until its learner was killed."""
    steps: int
    """Number of steps reported up to its end."""


def wait_until(condition: Callable[[], bool], what: str, process: "subprocess.Popen[str]") -> None:
    """Waits for `condition`; fails when the process ends."""
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {DEADLINE_S:.0f} s"
        assert process.poll() is None, f"{what}: the run ended with {process.returncode}: {process.communicate()[0]}"
        time.sleep(0.05)


def alive(process: psutil.Process) -> bool:
    """Whether it still runs; a zombie does not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def kill_learner(run: "subprocess.Popen[str]") -> None:
    """With SIGKILL; returns once it has ended."""
    (learner,) = [each for each in psutil.Process(run.pid).children(recursive=True) if LEARNER in each.cmdline()]
    learner.kill()
    learner.wait(30)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A shortened demo; the fixtures below run it one after the other."""
    return Pipeline(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def interrupted(demo: Pipeline) -> Interrupted:
    """The first start: its learner is killed and started again, until Ctrl-C."""
    run = demo.start(*OVERRIDES)
    wait_until(lambda: len(demo.records("step")) >= 13, "13 steps", run)
    kill_learner(run)
    steps_before_kill = len(demo.records("step"))
    wait_until(lambda: len(demo.records("step")) >= steps_before_kill + 2, "the learner's return", run)
    children = psutil.Process(run.pid).children(recursive=True)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    output = run.communicate(timeout=120)[0]
    psutil.wait_procs(children, timeout=5)  # multiprocessing's resource tracker ends a moment after its parent
    left = [child for child in children if alive(child)]
    return Interrupted(run.returncode, output, left, steps_before_kill, len(demo.records("step")))


@pytest.fixture(scope="module")
def finished(demo: Pipeline, interrupted: Interrupted) -> Pipeline:
    """The second start, to the end of the run."""
    done = demo.run(*OVERRIDES)
    assert done.returncode == 0, done.stdout + done.stderr
    return demo


def test_killed_learner_is_named_and_started_again(interrupted: Interrupted) -> None:
    assert "learner ended with signal SIGKILL" in interrupted.output


def test_ctrl_c_ends_a_run_and_all_its_processes(interrupted: Interrupted) -> None:
    assert interrupted.code == 130
    assert interrupted.output.splitlines()[-1].startswith("stopped; ")
    assert not interrupted.left


def test_the_same_command_continues_the_run(finished: Pipeline, interrupted: Interrupted) -> None:
    steps, kill = [record["step"] for record in finished.records("step")], interrupted.steps_before_kill
    assert steps[kill] <= steps[kill - 1], "what was trained after the checkpoint is undone"
    assert steps[kill] in FIRST_STEPS
    assert steps[interrupted.steps] == steps[interrupted.steps - 1] + 1
    assert steps[-1] == STEPS


def test_the_reward_rises_within_the_staleness_bound(finished: Pipeline) -> None:
    summary = finished.summary()
    assert summary["steps"] == STEPS
    assert summary["eval_score_first"] < 0.05
    assert summary["reward_last"] > 5 * summary["reward_first"]
    assert 0 < summary["staleness_mean"] <= summary["staleness_max"] <= 1


def test_engine_and_learner_agree_on_log_probs_of_a_version(finished: Pipeline) -> None:
    summary = finished.summary()
    assert summary["engine_mismatch_tokens"] >= 256 * 3
    assert summary["engine_mismatch_abs"] < 1e-4
    assert summary["engine_mismatch_kl"] < 1e-6


def test_every_issued_group_is_accounted_for(finished: Pipeline) -> None:
    groups = finished.summary()["groups"]
    ended = sum(groups[state] for state in ("ready", "leased", "trained", "filtered", "expired", "reissued"))
    assert groups["issued"] == ended
    assert groups["trained"] == STEPS * 32


def test_the_exported_model_answers_as_in_the_evaluation(finished: Pipeline) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from slipstream.env.builtin.digits import Digits

    folder = finished.run_folder / "model"
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    env = Digits(operation="reverse", length=3)
    tasks = [env.task("eval", index) for index in range(env.size("eval"))]
    prompts = torch.tensor([tokenizer(task.prompt)["input_ids"] for task in tasks])
    answers = model.generate(prompts, max_new_tokens=3, min_new_tokens=3, do_sample=False)[:, prompts.shape[1] :]
    right = [text == task.reference for text, task in zip(tokenizer.batch_decode(answers), tasks, strict=True)]
    assert sum(right) / len(right) == pytest.approx(finished.summary()["eval_score"], abs=1e-9)


def test_no_evaluation_exceeded_its_deadline(finished: Pipeline) -> None:
    logs = finished.run_folder / "logs"
    assert "rollout server joined" in (logs / "learner.jsonl").read_text()
    assert "evaluation not finished in time" not in (logs / "rollout.jsonl").read_text()


def test_every_metric_is_in_the_catalogue(finished: Pipeline) -> None:
    records = {kind: finished.records(kind) for kind in ("step", "eval")} | {"summary": [finished.summary()]}
    for kind, metrics in CATALOG.items():
        keys = {key for record in records[kind] for key in metric_names(record)}
        assert keys
        assert not {key for key in keys if not any(metric.matches(key) for metric in metrics)}


def test_curves_and_logs_are_written(finished: Pipeline) -> None:
    assert (finished.run_folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    for process in ("buffer", "rollout", "learner"):
        assert (finished.run_folder / "logs" / f"{process}.jsonl").stat().st_size > 0


def test_samples_of_steps_and_evaluations_are_kept(finished: Pipeline) -> None:
    folder = finished.run_folder / "samples"
    assert read_samples(folder, "step")[-1].number == STEPS
    assert {len(sample.trajectory.action_mask) for sample in read_samples(folder, "step")} == {7}
    assert read_samples(folder, "eval")


def test_the_initial_model_is_the_same_for_the_same_seed(finished: Pipeline, tmp_path: Path) -> None:
    from slipstream.models.digits import build_digits_model

    build_digits_model(tmp_path / "again", seed=0)
    again = (tmp_path / "again" / "model.safetensors").read_bytes()
    assert (finished.run_folder / "initial_model" / "model.safetensors").read_bytes() == again
