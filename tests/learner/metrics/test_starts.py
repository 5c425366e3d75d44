"""Starts of a run in `run.json`."""

import json
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from slipstream.learner.metrics import starts as starts_module
from slipstream.learner.metrics.starts import COMMAND_VARIABLE, read_starts, record_start, this_start
from tests.full_disk import files_of_at_most


def test_each_start_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts_module, "MOST_STARTS", 3)
    monkeypatch.setenv(COMMAND_VARIABLE, "slipstream up demo.yaml redis.url=redis://me:secret@host/0")
    path = tmp_path / "run.json"
    for name in "abcde":
        monkeypatch.setattr("platform.node", lambda name=name: name)
        record_start(path)
    starts = read_starts(path)
    assert [start["machine"]["host"] for start in starts] == ["a", "d", "e"]
    (start, *_) = starts
    assert start["command"].startswith("slipstream up demo.yaml")
    assert "secret" not in path.read_text(encoding="utf-8")
    assert start["packages"]["torch"] == version("torch")
    assert start["started_at"] > 1e9
    machine = start["machine"]
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] > 1 << 28
    assert (machine["gpus"], machine["driver"]) == ([], None) or machine["driver"]


@pytest.mark.parametrize("content", ["", "{", "3", '[{"command": "x"}, 4]'])
def test_damaged_file_is_written_anew(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(content, encoding="utf-8")
    kept = len(read_starts(path))
    record_start(path)
    assert len(json.loads(path.read_text(encoding="utf-8"))) == kept + 1


def test_full_disk_costs_the_entry_only(tmp_path: Path) -> None:
    with capture_logs() as logs, files_of_at_most(10):
        record_start(tmp_path / "run.json")
    assert read_starts(tmp_path / "run.json") == []
    assert [line["log_level"] for line in logs] == ["warning"]


def test_commit_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert this_start()["git"] is None

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *identity, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1", encoding="utf-8")
    git("add", "file")
    git("commit", "-qm", "first")
    assert this_start()["git"] == {"commit": git("rev-parse", "HEAD"), "changed": False}
    (tmp_path / "file").write_text("2", encoding="utf-8")
    assert this_start()["git"] == {"commit": git("rev-parse", "HEAD"), "changed": True}
