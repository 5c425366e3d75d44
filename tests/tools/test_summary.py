"""`slipstream summary`: what came of a run."""

import json
import re
from pathlib import Path

import pytest

from slipstream.configs.load import create_run_folder
from slipstream.configs.paths import LEARNER, UP, hold_run_lock
from tests.tools.run_command import demo_config, slipstream


@pytest.mark.parametrize("by", [UP, LEARNER])
def test_the_summary_of_a_run_that_goes_on_says_so(tmp_path: Path, by: str) -> None:
    config = demo_config(tmp_path)
    folder = config.paths
    folder.root.mkdir(parents=True)
    folder.config.write_text("{}")
    with hold_run_lock(config.paths, by=by):
        done = slipstream("summary", folder.root, folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"error: there is no {folder.summary} yet: the run is still going on\n"


def test_the_summary_of_a_finished_run_is_printed_and_its_picture_drawn(tmp_path: Path) -> None:
    groups = {
        "issued": 1640, "trained": 60, "filtered": 1484, "expired": 32,
        "reasons": {"filtered:reward_error": 1400, "filtered:dynamic_sampling": 84, "expired:run_finished": 32},
    }  # fmt: skip
    figures = {"steps": 2, "reward_first": 0.1, "reward_last": 0.987, "groups": groups}
    (tmp_path / "summary.json").write_text(json.dumps(figures))
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "reward": 0.5}\n')
    done = slipstream("summary", ".", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"run {tmp_path.name}" in done.stdout
    assert "0.100 → 0.987" in done.stdout
    assert "1,640 issued, 60 trained" in done.stdout
    rows = dict(re.findall(r"^│ (.+?) +│ (.+?) +│$", done.stdout, re.MULTILINE))
    assert (rows["steps"], rows["to greedy 0.9"], rows["greedy evaluation"]) == ("2 (policy version -)", "-", "-")
    told = " ".join(done.stdout.replace("│", " ").split())
    assert "1,484 filtered (1,400 reward_error, 84 dynamic_sampling), 32 expired (32 run_finished)" in told
    assert "curves   curves.png" in done.stdout
    assert (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("columns", ["10", "40"])
def test_a_narrow_terminal_shows_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    figures = {"staleness_mean": 0.99, "engine_mismatch_abs": 3.8e-8, "engine_mismatch_kl": 3.8e-13}
    (tmp_path / "summary.json").write_text(json.dumps(figures))
    done = slipstream("summary", ".", folder=tmp_path)
    assert "mean |Δ log-prob| 3.8e-08, KL" in done.stdout
    assert "3.8e-13" in done.stdout
    assert "mean 0.99, max - versions" in done.stdout
    assert "…" not in done.stdout


def test_a_folder_that_is_no_runs_has_no_summary_either(tmp_path: Path) -> None:
    done = slipstream("summary", tmp_path / "absent", folder=tmp_path)
    assert done.returncode == 2
    assert "absent is no run's folder" in done.stderr


def test_an_unfinished_run_has_no_summary_and_the_user_is_told_how_to_go_on(tmp_path: Path) -> None:
    create_run_folder(demo_config(tmp_path).paths, demo_config(tmp_path, "run.dir=runs"))
    (tmp_path / "elsewhere").mkdir()
    for named, where in (("../runs/demo", tmp_path / "elsewhere"), (".", tmp_path / "runs" / "demo")):
        done = slipstream("summary", named, folder=where)
        assert done.returncode == 1
        going_on = f"`slipstream up {Path(named) / 'config.yaml'} run.dir={tmp_path / 'runs'}` continues it"
        assert done.stderr.endswith(f"the run isn't finished; {going_on}\n")
    (tmp_path / "runs" / "demo").rename(tmp_path / "runs" / "demo.1")
    done = slipstream("summary", ".", folder=tmp_path / "runs" / "demo.1")
    assert done.stderr.endswith("the run isn't finished; to continue it, rename the folder to demo\n")
