"""Trackers: JSON lines in the run folder, and others in threads."""

import json
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.tracking import TrackingConfig
from slipstream.learner.metrics.destinations import Row
from slipstream.learner.metrics.trackers import BackgroundTracker, JsonlTracker, Record, build_trackers
from tests.full_disk import files_of_at_most
from tests.tools.run_command import until

DEADLINE_S = 60.0
STEP: Record = {"kind": "step", "step": 3, "reward": 0.25, "note": "text"}


def configuration(folder: Path, **tracking: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"run": {"name": "tracked", "dir": str(folder)}, "model": {"build": "digits"}, "tracking": tracking}
    )


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


@pytest.mark.parametrize("name", ["swanlab", "wandb", "mlflow", "tensorboard", "trackio"])
def test_missing_tracker_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("slipstream.learner.metrics.trackers.find_spec", lambda _: None)
    config = configuration(tmp_path, **{name: {}})
    with pytest.raises(ConfigError, match=rf"slipstream\[{name}\]"):
        build_trackers(config.paths, config.tracking, run="tracked", recorded={})


# --- in a thread ------------------------------------------------------------------------------------------------------


class Kept:
    """A destination in memory that fails as often as it is told."""

    def __init__(self, *, fails: int = 0) -> None:
        self.fails = fails
        self.numbers: list[tuple[int, dict[str, float]]] = []
        self.rows: list[tuple[str, int, list[Row]]] = []
        self.closed = False

    def open(self) -> "Kept":
        self._fail()
        return self

    def log(self, numbers: Mapping[str, float], *, step: int) -> None:
        self._fail()
        self.numbers.append((step, dict(numbers)))

    def add_rows(self, table: str, rows: Sequence[Row], *, step: int) -> None:
        self.rows.append((table, step, list(rows)))

    def close(self) -> None:
        self.closed = True

    def _fail(self) -> None:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("no route to host")


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.learner.metrics.trackers.LONGEST_PAUSE_S", 0.01)


def background(destination: Kept, **tracking: Any) -> BackgroundTracker:
    return BackgroundTracker("kept", destination.open, TrackingConfig(**tracking))


@pytest.mark.parametrize(
    ("names", "step", "evaluation"),
    [
        ("native", {"reward": 0.25, "score/math": 1.0, "lr": 0.1}, {"eval/score": 0.5, "eval/tasks": 8.0}),
        (
            "verl",
            {"critic/rewards/mean": 0.25, "critic/score/mean": 0.25, "score/math": 1.0, "actor/lr": 0.1},
            {"val-core/eval/reward/mean": 0.5, "eval/tasks": 8.0},
        ),
        (
            "trl",
            {"reward": 0.25, "rewards/math/mean": 1.0, "learning_rate": 0.1},
            {"eval_reward": 0.5, "eval/tasks": 8.0},
        ),
    ],
)
def test_tracker_gets_numbers_under_the_chosen_names(
    names: str, step: dict[str, float], evaluation: dict[str, float]
) -> None:
    kept = Kept()
    tracker = background(kept, names=names)
    tracker.log({**STEP, "steps": 9, "time_s": 2.0, "score/math": 1.0, "lr": 0.1})
    tracker.log({"kind": "eval", "step": 2, "time_s": 3.0, "score": 0.5, "tasks": 8})
    tracker.log({"kind": "finish", "time_s": 4.0})
    tracker.close()
    assert kept.numbers == [(3, step), (2, evaluation)]
    assert kept.closed


@pytest.mark.parametrize("fails", [1, 5])
def test_tracker_that_is_down_for_a_while_loses_nothing_and_is_named_once(fails: int) -> None:
    kept = Kept(fails=fails)
    with capture_logs() as logs:
        tracker = background(kept)
        for step in range(20):
            tracker.log({"kind": "step", "step": step, "reward": 1.0})
        until(lambda: len(kept.numbers) == 20)
        tracker.close()
    assert [step for step, _ in kept.numbers] == list(range(20))
    assert tracker.lost == 0
    assert [(entry["tracker"], "no route" in entry["error"]) for entry in logs] == [("kept", True)]


def test_refused_rows_cost_themselves() -> None:
    def unreadable() -> list[Row]:
        raise ValueError("no tokenizer")

    kept = Kept()
    tracker = background(kept)
    tracker.add_rows("samples/step", lambda: [{"prompt": "0"}])
    until(lambda: bool(kept.rows))
    kept.rows.clear()
    tracker.add_rows("samples/step", unreadable)
    tracker.add_rows("samples/step", lambda: [{"prompt": "1"}])
    tracker.close()
    assert (tracker.lost, kept.rows) == (1, [("samples/step", 0, [{"prompt": "1"}])])


def test_no_samples_are_sent_if_switched_off() -> None:
    kept = Kept()
    tracker = background(kept, samples=False)
    tracker.add_rows("samples/step", lambda: [{"prompt": "1"}])
    tracker.close()
    assert kept.rows == []


def test_tracker_that_blocks_delays_neither_training_nor_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.learner.metrics.trackers.MOST_WAITING", 2)
    monkeypatch.setattr("slipstream.learner.metrics.trackers.CLOSING_S", 0.1)
    entered, leave = threading.Event(), threading.Event()

    class Blocked(Kept):
        def log(self, numbers: Mapping[str, float], *, step: int) -> None:
            entered.set()
            leave.wait()

    tracker = background(Blocked())
    tracker.log(STEP)
    assert entered.wait(DEADLINE_S)
    for _ in range(5):
        tracker.log(STEP)
    assert tracker.lost == 3
    with capture_logs() as logs:
        tracker.close()
    leave.set()
    assert [entry["unsent"] for entry in logs] == [5]
