"""The console script `learner`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.configs.load import load_config
from slipstream.configs.paths import LEARNER, hold_run_lock
from slipstream.configs.runtime.errors import CERTAIN
from tests.full_disk import files_of_at_most

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


def run_learner(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slipstream.learner.cli", str(DEMO), f"run.dir={folder}", *overrides]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


def test_second_learner_is_refused_before_it_writes(tmp_path: Path) -> None:
    with hold_run_lock(load_config(DEMO, [f"run.dir={tmp_path}"]).paths, by=LEARNER):
        done = run_learner(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path / 'demo'} is in use by another learner (process ")
    assert len(done.stderr.splitlines()) == 1
    assert [path.suffix for path in (tmp_path / "demo").iterdir()] == [".lock"]


@pytest.mark.parametrize("options", [[], ["--undo-steps"]], ids=["resume", "undo"])
def test_undo_steps_reaches_training(options: list[str], tmp_path: Path) -> None:
    code = (
        "from slipstream.learner import cli\n"
        "cli.train = lambda config, signals, *, started, undo_steps: print(undo_steps)\n"
        "cli.main()"
    )
    command = [sys.executable, "-c", code, str(DEMO), f"run.dir={tmp_path}", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=110)
    assert done.stdout.split() == [str(bool(options))]


def test_finished_run_needs_no_learner(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "summary.json").write_text("{}")
    done = run_learner(tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "demo").iterdir()} >= {"summary.json", "logs"}
    assert not (tmp_path / "demo" / "checkpoints").exists()


def test_full_disk_is_reported_in_one_line(tmp_path: Path) -> None:
    with files_of_at_most(10_000):
        done = run_learner(tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (record,) = map(json.loads, (tmp_path / "demo" / "logs" / "learner.jsonl").read_text().splitlines())
    assert record["event"] == "learner failed"
    assert "File too large" in record["error"]
    assert f"see that {tmp_path / 'demo'} has room" in record["error"]


def test_missing_reference_model_is_named(tmp_path: Path) -> None:
    done = run_learner(tmp_path, "learner.kl={coefficient: 0.1, reference: /nowhere}")
    assert done.returncode == CERTAIN
    (line,) = done.stderr.splitlines()
    assert "learner failed" in line
    assert "learner.kl.reference=/nowhere holds no config.json" in line
