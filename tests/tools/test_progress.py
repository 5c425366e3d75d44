"""The progress table and line are made from metrics records alone; which of them is shown depends on the terminal."""

import os
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slipstream.tools.launch.progress import (
    LiveScreen,
    PlainScreen,
    Progress,
    apply_log,
    apply_metrics,
    bottleneck,
    line,
    make_screen,
    table,
)

START = Progress("demo", steps=400, max_staleness=4, eval_name="exact_match")
STEP: dict[str, Any] = {
    "kind": "step", "time_s": 12.3, "step": 17, "steps": 400, "policy_version": 18, "reward": 0.412,
    "score/exact_match": 0.053, "staleness_mean": 1.21, "staleness_max": 3, "step_s": 0.065,
    "learner_idle_fraction": 0.06, "generator_idle_fraction": 0.21, "tokens_generated_per_s": 11900.0,
    "tokens_trained_per_s": 23600.0, "weight_sync_s": 0.02, "generation_stall_s": 0.011,
    "buffer/in_flight": 64, "buffer/ready": 12, "buffer/leased": 32, "buffer/trained": 5440,
}  # fmt: skip
EVAL: dict[str, Any] = {"kind": "eval", "time_s": 11.0, "policy_version": 16, "score": 0.93, "tasks": 256}


def drawn(progress: Progress) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table(progress))
    return capture.get()


def test_the_table_shows_everything_that_a_step_reports() -> None:
    text = drawn(apply_metrics(apply_metrics(replace(START, elapsed_s=75.0), STEP), EVAL))
    for part in (
        "demo", "1:15", "17 of 400", "policy version 18", "0.412", "exact-match 0.053",
        "greedy 0.930 (version 16)",
        "mean 1.21", "max 3", "limit 4", "in flight 64", "ready 12", "leased 32", "0.065 s per step",
        "11,900 generated", "23,600 trained", "learner 6%", "generator 21%", "generator waits for tickets",
        "sync 20 ms", "generation stalled 11 ms",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(("bound", "shown"), [(1, "(limit 4, throttled to 1)"), (4, "(limit 4)")])
def test_a_throttle_that_holds_the_staleness_down_is_shown(bound: int, shown: str) -> None:
    assert shown in drawn(apply_metrics(START, STEP | {"throttle/max_staleness": bound}))


def test_missing_and_odd_fields_show_as_dashes() -> None:
    text = drawn(apply_metrics(START, {"kind": "step", "step": 1, "reward": None, "step_s": "soon"}))
    assert "1 of 400" in text
    assert "- s per step" in text


def test_the_rate_of_trained_tokens_follows_from_the_step_if_it_is_not_told() -> None:
    record = {"kind": "step", "step": 1, "tokens": 1536, "step_s": 0.5}
    assert "3,072 trained" in drawn(apply_metrics(START, record))


def test_before_the_first_step_the_user_sees_the_stage_and_what_each_process_said() -> None:
    progress = replace(START, stage="waiting for Redis at [fd00::1]", messages={"rollout": "loading [weights]"})
    assert "waiting for Redis at [fd00::1] …" in drawn(progress)
    assert "loading [weights]" in drawn(progress)
    assert line(progress).endswith("waiting for Redis at [fd00::1] (rollout: loading [weights])")


def test_of_groups_that_fail_the_user_sees_why_and_how_many() -> None:
    failed = {"event": "episode failed", "reason": "reward_error", "detail": "mine: ValueError:\n\x1b[31mboom\ud800"}
    progress = apply_log(START, "rollout", {"event": "joined the buffer"})
    for _ in range(3):
        progress = apply_log(progress, "rollout", failed)
    assert "(rollout: episode failed, 3 so far; the last: reward_error: mine: ValueError:  [31mboom )" in line(progress)
    assert "reward_error" in drawn(progress)
    assert len(line(apply_log(progress, "rollout", failed | {"detail": "x" * 10_000}))) < 500


def test_what_the_buffer_repeats_of_a_group_that_failed_is_counted_once() -> None:
    failed = {"event": "group failed", "level": "warning", "reason": "reward_error", "detail": "boom"}
    assert apply_log(START, "buffer", failed) == START


DEAD = {"event": "engine died", "level": "warning", "timestamp": "noon", "server": "r0", "reason": "NaN", "in_a_row": 5}


def test_a_warning_is_shown_with_its_reasons_also_after_the_first_step_and_nothing_else_that_is_said() -> None:
    calm = apply_metrics(START, STEP)
    progress = apply_log(calm, "rollout", DEAD)
    progress = apply_log(progress, "rollout", {"event": "engine [ready]", "level": "info"})
    assert line(progress).removeprefix(line(calm)) == " (rollout: engine died (reason: NaN; in_a_row: 5))"
    assert "rollout    engine died (reason: NaN; in_a_row: 5)" in drawn(progress)


def test_the_learner_names_the_rollout_server_that_it_warns_of() -> None:
    evicted = {"event": "rollout server evicted", "level": "warning", "server": "r1", "reason": "slow"}
    assert "learner: rollout server evicted (server: r1; reason: slow)" in line(apply_log(START, "learner", evicted))


def test_a_warning_goes_when_there_are_steps_a_minute_later() -> None:
    progress = apply_log(replace(apply_metrics(START, STEP), elapsed_s=100.0), "rollout", DEAD)
    for elapsed_s in (159.0, 500.0):
        assert "engine died" in line(replace(progress, elapsed_s=elapsed_s))
    assert "engine died" in line(apply_metrics(replace(progress, elapsed_s=159.0), STEP))
    assert "engine died" not in line(apply_metrics(replace(progress, elapsed_s=161.0), STEP))


@pytest.mark.parametrize(("step_s", "quiet_s", "usual_s"), [(0.1, 11.0, 9.0), (30.0, 91.0, 89.0), (None, 11.0, 9.0)])
def test_who_waited_in_the_last_step_is_not_said_when_that_was_long_ago(
    step_s: float | None, quiet_s: float, usual_s: float
) -> None:
    progress = apply_metrics(replace(START, elapsed_s=40.0), STEP | {"step_s": step_s})
    for shown in (line, drawn):
        assert "generator waits for tickets" in shown(replace(progress, elapsed_s=40.0 + usual_s))
        quiet = shown(replace(progress, elapsed_s=40.0 + quiet_s))
        assert f"no step for {quiet_s:.0f} s" in quiet
        assert "waits" not in quiet


@pytest.mark.parametrize(("filtered", "shown"), [(1484, "filtered 94%"), (15, ""), (0, "")])
def test_the_share_of_groups_that_are_dropped_is_shown_where_it_is_a_share(filtered: int, shown: str) -> None:
    progress = apply_metrics(START, STEP | {"buffer/issued": 1583, "buffer/filtered": filtered})
    for text in (line(progress), drawn(progress)):
        assert shown in text
        assert ("filtered" in text) == bool(shown)


def test_a_table_with_all_its_troubles_fits_into_a_small_terminal() -> None:
    progress = apply_metrics(START, STEP | {"buffer/issued": 1583, "buffer/filtered": 1484})
    for name in ("rollout", "learner"):
        progress = apply_log(progress, name, DEAD | {"reason": "x " * 1000})
    console = Console(width=80, height=24)
    with console.capture() as capture:
        console.print(table(progress))
    assert len(capture.get().splitlines()) <= 24


def test_a_rollout_server_that_joins_before_the_first_step_begins_to_generate() -> None:
    joined = {"event": "joined the buffer", "level": "info", "version": 0}
    assert apply_log(START, "rollout", joined).stage == "generating the first groups"
    assert apply_log(apply_metrics(START, STEP), "rollout", joined).stage == "training"


@pytest.mark.parametrize(
    ("name", "step", "shown"),
    [
        (None, STEP, "reward 0.412  greedy 0.930 (version 16)"),
        ("digit_match", STEP, "reward 0.412  greedy 0.930 (version 16)"),
        ("exact_match", STEP, "reward 0.412  exact-match 0.053, greedy 0.930 (version 16)"),
    ],
)
def test_an_evaluated_score_is_shown_of_the_training_answers_where_it_is_one_of_their_own(
    name: str | None, step: dict[str, Any], shown: str
) -> None:
    assert shown in line(apply_metrics(apply_metrics(replace(START, eval_name=name), step), EVAL))


def test_records_of_other_kinds_change_nothing() -> None:
    assert apply_metrics(START, {"kind": "finish"}) == START
    assert apply_metrics(START, {}) == START


@pytest.mark.parametrize(
    ("learner", "generator", "words"),
    [
        (0.4, 0.0, "learner waits for groups"),
        (0.0, 0.4, "generator waits for tickets"),
        (0.10, 0.12, "balanced"),
        (None, 0.4, ""),
    ],
)
def test_who_waits_for_whom_is_said_in_words(learner: float | None, generator: float, words: str) -> None:
    assert bottleneck({"learner_idle_fraction": learner, "generator_idle_fraction": generator}) == words


def test_the_plain_screen_prints_when_enough_time_or_enough_steps_have_passed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def at(elapsed_s: float, step: int) -> Progress:
        return replace(apply_metrics(START, {**STEP, "step": step}), elapsed_s=elapsed_s)

    with PlainScreen() as screen:
        for state in (at(1, 1), at(2, 2), at(3, 21), at(4, 40), at(8, 40), at(9, 41)):
            screen.show(state)
    steps = [text.split("step ")[1].split("/")[0] for text in capsys.readouterr().out.splitlines()]
    assert steps == ["1", "21", "40", "41"]  # the last because a run must not end unsaid


def test_the_plain_screen_says_the_same_again_only_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    training = apply_metrics(START, STEP | {"step_s": 100.0})
    with PlainScreen() as screen:
        for elapsed_s in range(1, 150):
            screen.show(replace(training, elapsed_s=float(elapsed_s)))
    assert [float(text.split(" s  ")[0]) for text in capsys.readouterr().out.splitlines()] == [1.0, 61.0, 121.0]


@pytest.mark.parametrize(
    ("terminal", "plain", "screen"),
    [
        ("xterm-256color", False, LiveScreen),
        ("xterm-256color", True, PlainScreen),
        ("dumb", False, PlainScreen),  # as in the shells of some editors
        ("unknown", False, PlainScreen),
    ],
)
def test_a_terminal_gets_a_live_table_if_it_can_draw_one(
    terminal: str, plain: bool, screen: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", terminal)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    ours, theirs = os.openpty()
    with open(theirs, "w") as stdout, redirect_stdout(stdout):  # noqa: PTH123  (it has no path)
        assert isinstance(make_screen(plain=plain), screen)
    os.close(ours)


def test_a_file_gets_lines_even_where_colours_are_forced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with (tmp_path / "out").open("w") as stdout, redirect_stdout(stdout):
        assert isinstance(make_screen(plain=False), PlainScreen)
