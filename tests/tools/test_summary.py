"""`slipstream summary`: the table, the curves, and the reader of metrics."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.load import create_run_folder
from slipstream.configs.paths import LEARNER, UP, hold_run_lock
from slipstream.tools.follow import JsonLinesFollower, Record
from slipstream.tools.summary import below, draw_curves, evaluations, last_of_each_step, rolling_mean, thinned
from tests.tools.conftest import CommandLine
from tests.tools.run_command import demo_config


def step(number: int, version: int | None = None, **fields: float) -> Record:
    return {"kind": "step", "step": number, "policy_version": number if version is None else version, **fields}


def evaluation(version: int, score: float, **fields: int) -> Record:
    return {"kind": "eval", "policy_version": version, "score": score, **fields}


# --- the command ------------------------------------------------------------------------------------------------------


def test_summary_of_a_finished_run_is_printed_and_drawn(cli: CommandLine, tmp_path: Path) -> None:
    groups = {
        "issued": 1640, "trained": 60, "filtered": 1484, "expired": 32,
        "reasons": {"filtered:reward_error": 1400, "filtered:dynamic_sampling": 84, "expired:run_finished": 32},
    }  # fmt: skip
    figures = {
        "steps": 2, "reward_first": 0.1, "reward_last": 0.987, "eval_coverage": 0.25, "eval_lower_bound": 0.234,
        "groups": groups,
    }  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(figures))
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "reward": 0.5}\n')
    assert cli("summary", ".", folder=tmp_path) == 0, cli.err
    rows = dict(re.findall(r"^│ (.+?) +│ (.+?) +│$", cli.out, re.MULTILINE))
    assert (rows["steps"], rows["to a score of 0.9"], rows["evaluation"]) == ("2 (policy version -)", "-", "-")
    assert rows["reward"] == "0.100 → 0.987"
    assert re.findall(r"[\d.]+%|\d\.\d+", rows["of all tasks"]) == ["25%", "0.234"]
    text = " ".join(cli.out.replace("│", " ").split())
    assert "1,640 issued, 60 trained" in text
    assert "1,484 filtered (1,400 reward_error, 84 dynamic_sampling), 32 expired (32 run_finished)" in text
    assert (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("columns", ["10", "40"])
def test_narrow_terminal_shows_every_figure(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    figures = {"staleness_mean": 0.99, "engine_mismatch_abs": 3.8e-8, "engine_mismatch_kl": 3.8e-13}
    (tmp_path / "summary.json").write_text(json.dumps(figures))
    assert cli("summary", ".", folder=tmp_path) == 0
    for part in ("mean |Δ log-prob| 3.8e-08, KL", "3.8e-13", "mean 0.99, max - versions"):
        assert part in cli.out
    assert "…" not in cli.out


@pytest.mark.parametrize("by", [UP, LEARNER])
def test_running_or_absent_run_has_no_summary(cli: CommandLine, tmp_path: Path, by: str) -> None:
    folder = demo_config(tmp_path).paths
    folder.root.mkdir(parents=True)
    folder.config.write_text("{}")
    with hold_run_lock(folder, by=by):
        assert cli("summary", folder.root) == 1
    (line,) = cli.err.splitlines()
    assert str(folder.summary) in line
    assert cli("summary", tmp_path / "absent") == 2
    assert str(tmp_path / "absent") in cli.err


def test_unfinished_run_is_refused_with_the_command_to_continue(cli: CommandLine, tmp_path: Path) -> None:
    folder = demo_config(tmp_path).paths
    create_run_folder(folder, demo_config(tmp_path, "run.dir=runs"))
    folder.summary.write_text('{"steps": 12')  # as a crash leaves it
    (tmp_path / "elsewhere").mkdir()
    for named, where in (("../runs/demo", tmp_path / "elsewhere"), (".", folder.root)):
        assert cli("summary", named, folder=where) == 1
        assert f"`slipstream up {Path(named) / 'config.yaml'} run.dir={tmp_path / 'runs'}`" in cli.err
    for words in (["summary", "demo"], ["summary"]):  # by name, and the latest
        cli(*words, folder=tmp_path)
        assert "runs/demo/summary.json" in cli.err
    folder.root.rename(tmp_path / "runs" / "demo.1")
    cli("summary", ".", folder=tmp_path / "runs" / "demo.1")
    assert cli.err.endswith(" demo\n")


# --- curves -----------------------------------------------------------------------------------------------------------


def test_picture_is_a_png_of_readable_size(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    records = [step(n, reward=n / 50, step_s=0.06, staleness_max=3) for n in range(1, 50)]
    assert draw_curves([*records, evaluation(0, 0.1)], eval_reward="exact_match", title="demo", path=path)
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:24])
    assert width >= 1200
    assert height >= 800


@pytest.mark.parametrize("eval_reward", [None, "exact_match"])
def test_picture_needs_steps_but_no_figures(tmp_path: Path, eval_reward: str | None) -> None:
    path = tmp_path / "curves.png"
    assert not draw_curves([evaluation(0, 0.1)], eval_reward=eval_reward, title="demo", path=path)
    assert not path.exists()
    assert draw_curves([{"kind": "step", "step": 1}], eval_reward=eval_reward, title="demo", path=path)


def test_repeated_step_counts_once() -> None:
    records = [step(1, reward=0.1), step(2, reward=0.2), step(2, reward=0.3), step(3, reward=0.4)]
    assert [record["reward"] for record in last_of_each_step(records)] == [0.1, 0.3, 0.4]


def test_evaluation_is_drawn_at_the_step_of_its_version() -> None:
    steps = [step(n, n // 4) for n in range(1, 13)]
    assert evaluations([evaluation(version, version / 10) for version in (0, 2)], steps) == ([0.0, 8.0], [0.0, 0.2])
    begun, undone, repeated = [step(1), step(2)], [step(3), step(4)], [step(3, 6), step(4, 7)]
    scores = [evaluation(4, 0.9, step=4), evaluation(5, 0.2, step=2), evaluation(7, 0.4, step=4)]
    assert evaluations([*begun, *undone, *repeated, *scores], [*begun, *repeated]) == ([2.0, 4.0], [0.2, 0.4])


def test_lower_bound_is_drawn_where_it_differs() -> None:
    scores, lower = [0.1, 0.2, 0.4, 0.5, 0.6], [0.1, 0.2, 0.3, 0.0, 0.5, 0.6]
    found = below(([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], lower), ([0.0, 1.0, 2.0, 4.0, 5.0], scores))
    assert str(found[1]) == "[nan, 0.2, 0.3, 0.0, 0.5, nan]"
    assert below(([0.0], [0.1]), ([0.0], [0.1]))[0] == [0.0]


def test_rolling_mean_is_centred_and_shorter_at_the_ends() -> None:
    assert rolling_mean([0.0, 3.0, 6.0, 9.0], 3) == [1.5, 3.0, 6.0, 7.5]
    assert rolling_mean([1.0, 2.0], 1) == [1.0, 2.0]


def test_rolling_mean_is_linear_in_the_number_of_values() -> None:
    class Counted(float):
        additions = 0

        def __radd__(self, other: float) -> float:
            Counted.additions += 1
            return other + float(self)

    rolling_mean([Counted(1.0)] * 1000, 100)
    assert Counted.additions <= 2000


def test_thinning_keeps_the_extremes_of_each_stretch() -> None:
    steps, values = [float(n) for n in range(10)], [0.0, 5.0, 1.0, 1.0, 9.0, 2.0, 3.0, 2.0, 2.0, 2.0]
    assert thinned((steps, values), most=10) == (steps, values)
    assert thinned((steps, values), most=5) == ([0.0, 1.0, 4.0, 5.0, 8.0], [0.0, 5.0, 9.0, 2.0, 2.0])


# --- the reader of metrics --------------------------------------------------------------------------------------------


def test_follower_reads_complete_json_objects_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = JsonLinesFollower(path)
    assert follower.new_records() == []
    path.write_text('{"a": 1}\nnonsense\n{"b"')
    assert follower.new_records() == [{"a": 1}]
    with path.open("a") as file:
        file.write(": 2}\n")
    assert follower.new_records() == [{"b": 2}]
    assert JsonLinesFollower(path).new_records() == []


@pytest.mark.parametrize("rotate", [lambda path: path.rename(path.with_suffix(".1")), lambda path: path.write_text("")])
def test_follower_restarts_after_rotation(tmp_path: Path, rotate: Callable[[Path], Any]) -> None:
    path = tmp_path / "learner.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    follower = JsonLinesFollower(path)
    rotate(path)
    with path.open("a") as file:
        file.write('{"b": 1}\n')
    assert follower.new_records() == [{"b": 1}]
    assert follower.new_records() == []
