"""`slipstream up` with a trainer that is a learner alone: stopped, continued, killed; without Redis and servers."""

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.configs.paths import RunPaths, checkpoint_steps
from slipstream.rollout_servers.cli import PROCESS_VARIABLE
from slipstream.tools.summary import read_summary
from tests.tools.launch.test_up import left_behind
from tests.tools.run_command import DEADLINE_S, command, slipstream, until

pytestmark = pytest.mark.timeout(300)

STEPS, SAVED_EVERY = 160, 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration and its rows."""
    rows = [{"prompt": f"{n:03}r", "completion": f"{n:03}"[::-1]} for n in range(64)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = {
        "run": {"name": "sft"}, "model": {"build": "digits", "dtype": "float32"},
        "learner": {
            "trainer": {"name": "sft", "data": "rows.jsonl", "rows_per_step": 8, "validation": {"rows": 8}},
            "steps": STEPS, "checkpoint": {"every_steps": SAVED_EVERY}, "optimizer": {"lr": 1e-3},
        },
    }  # fmt: skip
    (tmp_path / "sft.yaml").write_text(json.dumps(run))
    return tmp_path / "sft.yaml"


def start(file: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("up", file, "--plain"), cwd=file.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def records(paths: RunPaths) -> list[dict[str, Any]]:
    """Steps as they were done, repeated ones several times."""
    with suppress(FileNotFoundError):
        lines = paths.metrics.read_bytes().split(b"\n")[:-1]
        return [record for record in map(json.loads, lines) if record["kind"] == "step"]
    return []


def learner_of(process: subprocess.Popen[str]) -> psutil.Process:
    for child in psutil.Process(process.pid).children():
        with suppress(psutil.Error):
            if child.environ().get(PROCESS_VARIABLE) == "learner":
                return child
    raise AssertionError("no learner runs")


def test_run_is_stopped_continued_and_survives_a_kill(file: Path) -> None:
    paths = RunPaths(file.parent / "runs" / "sft")
    with start(file) as process:
        until(lambda: len(records(paths)) > 3)
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGINT, output
    stopped = checkpoint_steps(paths.checkpoints)[-1]
    assert stopped == records(paths)[-1]["step"] < STEPS
    with start(file) as process:
        until(lambda: records(paths)[-1]["step"] >= stopped + SAVED_EVERY + 5)
        learner_of(process).kill()
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    assert "continues the unfinished run" in output
    losses: dict[int, list[float]] = {}
    for record in records(paths):
        losses.setdefault(record["step"], []).append(record["loss"])
    assert list(losses) == list(range(1, STEPS + 1))
    repeated = [found for found in losses.values() if len(found) > 1]
    assert repeated
    assert all(len({*found}) == 1 for found in repeated)  # equal to the bit
    summary = read_summary(paths)
    assert summary["restarts"] == {"learner": 1}
    assert list(summary["placement"]["processes"]) == ["learner"]
    assert summary["validation_loss_last"] < summary["validation_loss_first"]
    assert not paths.redis.exists()
    assert {path.stem for path in paths.logs.glob("*.jsonl")} == {"learner"}
    assert left_behind(file.parent) == []
    again = slipstream("up", file, folder=file.parent)
    assert again.returncode == 2
    assert f"model.path={paths.export.relative_to(file.parent)}" in again.stderr
