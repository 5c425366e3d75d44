"""A run that loses its learner continues from the last checkpoint."""

import os
import signal
import subprocess
import time
from collections.abc import Callable

import psutil
import pytest

from tests.conftest import free_port
from tests.pipeline.conftest import DEADLINE_S, Pipeline

LEARNER = "slipstream.learner.cli"
OVERRIDES = ("learner.steps=45", "learner.checkpoint.every_steps=10", "eval.every_steps=0")


def wait_until(condition: Callable[[], bool], what: str, process: "subprocess.Popen[str]") -> None:
    """Waits for `condition`, as long as the process lives."""
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {DEADLINE_S:.0f} s"
        assert process.poll() is None, f"{what}: the run ended with {process.returncode}: {process.communicate()[0]}"
        time.sleep(0.05)


def child(process: "subprocess.Popen[str]", module: str) -> psutil.Process:
    """The run's process that runs `module`."""
    children = psutil.Process(process.pid).children(recursive=True)
    return next(each for each in children if module in each.cmdline())


def alive(process: psutil.Process) -> bool:
    """Whether it still runs; one that is dead but not yet reaped by its parent does not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.timeout(600)
def test_a_killed_learner_is_named_and_the_same_command_continues_from_the_checkpoint(pipeline: Pipeline) -> None:
    first = pipeline.start(*OVERRIDES)
    wait_until(lambda: len(pipeline.records("step")) >= 13, "13 steps", first)
    survivors = psutil.Process(first.pid).children(recursive=True)
    os.kill(child(first, LEARNER).pid, signal.SIGKILL)
    output = first.communicate(timeout=120)[0]
    assert first.returncode == 1
    assert "learner ended with" in output
    assert not [process for process in survivors if alive(process)]

    second = pipeline.run(*OVERRIDES)
    assert second.returncode == 0, second.stdout + second.stderr
    steps = [record["step"] for record in pipeline.records("step")]
    restarted_at = next(i for i in range(1, len(steps)) if steps[i] <= steps[i - 1])
    assert steps[restarted_at] in (11, 21, 31, 41)
    assert steps[-1] == 45
    groups = pipeline.summary()["groups"]
    # What was trained after the checkpoint is undone: the committed history holds each step's groups once.
    assert groups["trained"] == 45 * 32
    ended = sum(groups[state] for state in ("ready", "leased", "trained", "filtered", "expired", "reissued"))
    assert groups["issued"] == ended


@pytest.mark.timeout(600)
def test_ctrl_c_ends_a_run_and_leaves_no_process_behind(pipeline: Pipeline) -> None:
    run = pipeline.start(*OVERRIDES)
    wait_until(lambda: len(pipeline.records("step")) >= 2, "2 steps", run)
    children = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGINT)
    output = run.communicate(timeout=120)[0]
    assert run.returncode == 130
    assert "continues the run" in output
    assert not [process for process in children if alive(process)]


@pytest.mark.timeout(600)
def test_two_learner_ranks_under_torchrun_train_one_policy(pipeline: Pipeline) -> None:
    with pipeline.services("learner.steps=10", "eval.every_steps=0") as services:
        port = free_port()
        ranks = services.start("torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}", "-m", LEARNER)
        output = ranks.communicate(timeout=DEADLINE_S)[0]
        assert ranks.returncode == 0, output
    summary = pipeline.summary()
    assert summary["groups"]["trained"] == 10 * 32
    assert summary["engine_mismatch_abs"] < 1e-4
