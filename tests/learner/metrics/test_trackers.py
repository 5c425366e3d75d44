"""Trackers: JSON lines in the run folder, and SwanLab."""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE
from slipstream.learner.metrics.trackers import JsonlTracker, Record, Tracker, build_trackers
from tests.full_disk import files_of_at_most

STEP: Record = {"kind": "step", "step": 3, "reward": 0.25, "note": "text"}
# Logs to SwanLab in a process of its own, because SwanLab changes the process that it is in.
LOG_TO_SWANLAB = """
import sys
from slipstream.configs import RunConfig
from slipstream.learner.metrics.trackers import Record
from slipstream.learner.metrics.trackers import build_trackers
config = RunConfig.model_validate_json(sys.argv[1])
trackers = build_trackers(config.paths, config.tracking, run="tracked", recorded={})
assert [type(tracker).__name__ for tracker in trackers] == ["JsonlTracker", "SwanlabTracker"]
for tracker in trackers:
    tracker.log({"kind": "step", "step": 3, "steps": 9, "reward": 0.25, "buffer/ready": 12, "note": "text"})
    tracker.log({"kind": "eval", "policy_version": 3, "score": 0.625})
    tracker.log({"kind": "finish", "reward": 0.875})
    tracker.close()
"""


def configuration(folder: Path, **tracking: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"run": {"name": "tracked", "dir": str(folder)}, "model": {"build": "digits"}, "tracking": tracking}
    )


def trackers_of(config: RunConfig) -> list[Tracker]:
    return build_trackers(config.paths, config.tracking, run=config.run.name, recorded={})


def stored_records(run_folder: Path) -> Iterator[bytes]:
    """What SwanLab has stored of a run, by its own reader."""
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (path,) = run_folder.glob("*.swanlab")
    reader = DataStoreReader()
    reader.open(path)
    yield from reader
    reader.close()


def test_record_can_be_read_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(STEP)
    assert json.loads(path.read_text()) == STEP
    tracker.log({"kind": "finish"})
    assert len(path.read_text().splitlines()) == 2
    tracker.close()


def test_resumed_run_appends_to_its_file(tmp_path: Path) -> None:
    for step in (1, 2):
        tracker = JsonlTracker(tmp_path / "metrics.jsonl")
        tracker.log({"kind": "step", "step": step})
        tracker.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


@pytest.mark.parametrize("room_bytes", [0, 5])
def test_full_disk_leaves_no_half_line(tmp_path: Path, room_bytes: int) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(STEP)
    before = path.read_bytes()
    with files_of_at_most(len(before) + room_bytes), pytest.raises(OSError, match="too large"):
        tracker.log(STEP)
    assert path.read_bytes() == before
    tracker.log(STEP)
    assert path.read_bytes() == 2 * before
    tracker.close()


@pytest.mark.parametrize("whole_lines", [0, 2])
def test_half_line_of_killed_process_is_removed(tmp_path: Path, whole_lines: int) -> None:
    path, line = tmp_path / "metrics.jsonl", json.dumps(STEP).encode() + b"\n"
    path.write_bytes(whole_lines * line + line[:9])
    tracker = JsonlTracker(path)
    tracker.log(STEP)
    tracker.close()
    assert path.read_bytes() == (whole_lines + 1) * line


def test_deleted_file_is_created_again(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    tracker = JsonlTracker(path)
    for step in (1, 2, 3):
        if step == 2:
            shutil.rmtree(path.parent)
        tracker.log({"kind": "step", "step": step})
    tracker.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2, 3]


def test_non_finite_numbers_become_null(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log({"kind": "step", "loss": float("nan"), "kl": float("inf"), "reward": 1.0})
    tracker.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "kind": "step", "loss": None, "kl": None, "reward": 1.0,
    }  # fmt: skip


def test_missing_tracker_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "swanlab", None)  # an import of it now fails
    with pytest.raises(ConfigError, match=r"slipstream\[trackers\]"):
        trackers_of(configuration(tmp_path, swanlab={}))


@pytest.mark.skipif(find_spec("swanlab") is None, reason="needs the extra trackers")
@pytest.mark.parametrize("mode", ["local", "offline"])
def test_swanlab_logs_steps_and_evaluations_offline(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REDIS_PASSWORD_VARIABLE, "secret")
    config = configuration(tmp_path, swanlab={"mode": mode})
    command = [sys.executable, "-c", LOG_TO_SWANLAB, config.model_dump_json()]
    # Nothing but loopback, and not even that is up, where the machine lets us make such a network.
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if which("unshare") and subprocess.run([*alone, "true"], check=False).returncode == 0:
        command = [*alone, *command]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=100)
    (run_folder,) = (tmp_path / "tracked" / "swanlab").glob("run-*")
    files = [path for path in run_folder.rglob("*") if path.is_file()]
    logged = b"".join(stored_records(run_folder))
    assert not any(b"secret" in content for content in [logged, *(path.read_bytes() for path in files)])
    for name, value in (("reward", 0.25), ("buffer/ready", 12.0), ("eval/score", 0.625)):
        assert name.encode() in logged
        assert struct.pack("<d", value) in logged
    assert struct.pack("<d", 0.875) not in logged
