"""The picture of a run."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.tools.follow import JsonLinesFollower, Record
from slipstream.tools.report import draw_curves, evaluations, last_of_each_step, rolling_mean, thinned


def step(number: int, **fields: float) -> Record:
    return {"kind": "step", "step": number, "policy_version": number, **fields}


def test_the_picture_is_a_png_of_readable_size(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    records = [step(n, reward=n / 50, step_s=0.06, staleness_max=3) for n in range(1, 50)]
    assert draw_curves(
        [*records, {"kind": "eval", "policy_version": 0, "score": 0.1}],
        eval_reward="exact_match",
        title="demo",
        path=path,
    )
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:24])
    assert width >= 1200
    assert height >= 800


@pytest.mark.parametrize("eval_reward", [None, "exact_match"])
def test_steps_without_any_figures_still_make_a_picture(tmp_path: Path, eval_reward: str | None) -> None:
    assert draw_curves(
        [{"kind": "step", "step": 1}], eval_reward=eval_reward, title="demo", path=tmp_path / "curves.png"
    )


def test_a_run_without_steps_has_no_picture(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    assert not draw_curves(
        [{"kind": "eval", "policy_version": 0, "score": 0.1}], eval_reward="exact_match", title="demo", path=path
    )
    assert not path.exists()


def test_a_step_that_was_done_again_after_a_restart_counts_once() -> None:
    records = [step(1, reward=0.1), step(2, reward=0.2), step(2, reward=0.3), step(3, reward=0.4)]
    assert [record["reward"] for record in last_of_each_step(records)] == [0.1, 0.3, 0.4]


def test_evaluations_stand_at_the_step_that_made_their_version() -> None:
    steps = [{"kind": "step", "step": n, "policy_version": n // 4} for n in range(1, 13)]
    records = [{"kind": "eval", "policy_version": v, "score": v / 10} for v in (0, 2)]
    assert evaluations(records, steps) == ([0.0, 8.0], [0.0, 0.2])


def test_evaluations_of_undone_steps_are_not_drawn_and_that_of_a_restart_where_it_came_in() -> None:
    def step(number: int, version: int) -> dict[str, Any]:
        return {"kind": "step", "step": number, "policy_version": version}

    def evaluation(number: int, version: int, score: float) -> dict[str, Any]:
        return {"kind": "eval", "step": number, "policy_version": version, "score": score}

    begun, undone, again = [step(1, 1), step(2, 2)], [step(3, 3), step(4, 4)], [step(3, 6), step(4, 7)]
    scores = [evaluation(4, 4, 0.9), evaluation(2, 5, 0.2), evaluation(4, 7, 0.4)]
    assert evaluations([*begun, *undone, *again, *scores], [*begun, *again]) == ([2.0, 4.0], [0.2, 0.4])


def test_the_rolling_mean_is_centred_and_shorter_at_the_ends() -> None:
    assert rolling_mean([0.0, 3.0, 6.0, 9.0], 3) == [1.5, 3.0, 6.0, 7.5]
    assert rolling_mean([1.0, 2.0], 1) == [1.0, 2.0]


def test_of_a_long_run_each_stretch_keeps_its_lowest_and_its_highest_point() -> None:
    steps, values = [float(n) for n in range(10)], [0.0, 5.0, 1.0, 1.0, 9.0, 2.0, 3.0, 2.0, 2.0, 2.0]
    assert thinned((steps, values), most=10) == (steps, values)
    assert thinned((steps, values), most=5) == ([0.0, 1.0, 4.0, 5.0, 8.0], [0.0, 5.0, 9.0, 2.0, 2.0])


def test_a_wide_window_costs_the_rolling_mean_no_more_than_a_narrow_one() -> None:
    class Counted(float):
        additions = 0

        def __radd__(self, other: float) -> float:
            Counted.additions += 1
            return other + float(self)

    rolling_mean([Counted(1.0)] * 1000, 100)
    assert Counted.additions <= 2000


def test_a_follower_waits_for_the_end_of_a_line_and_passes_over_what_is_no_record(tmp_path: Path) -> None:
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
def test_a_follower_begins_anew_when_its_file_is_rotated(tmp_path: Path, rotate: Callable[[Path], object]) -> None:
    path = tmp_path / "learner.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    follower = JsonLinesFollower(path)
    rotate(path)
    with path.open("a") as file:
        file.write('{"b": 1}\n')
    assert follower.new_records() == [{"b": 1}]
    assert follower.new_records() == []
