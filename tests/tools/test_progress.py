"""The progress table and line are made from metrics records alone."""

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from slipstream.tools.progress import Progress, heard, line, observe, table, who_waits
from slipstream.tools.screen import PlainScreen

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
    text = drawn(replace(observe(observe(START, STEP), EVAL), elapsed_s=75.0))
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
    assert shown in drawn(observe(START, STEP | {"throttle/max_staleness": bound}))


def test_missing_and_odd_fields_show_as_dashes() -> None:
    text = drawn(observe(START, {"kind": "step", "step": 1, "reward": None, "step_s": "soon"}))
    assert "1 of 400" in text
    assert "- s per step" in text


def test_the_rate_of_trained_tokens_follows_from_the_step_if_it_is_not_told() -> None:
    record = {"kind": "step", "step": 1, "tokens": 1536, "step_s": 0.5}
    assert "3,072 trained" in drawn(observe(START, record))


def test_before_the_first_step_the_user_sees_the_stage_and_what_each_process_said() -> None:
    progress = replace(START, stage="starting the engine", words={"rollout": "loading [weights]"})
    assert "starting the engine" in drawn(progress)
    assert "loading [weights]" in drawn(progress)
    assert line(progress).endswith("starting the engine (rollout: loading [weights])")


def test_of_groups_that_fail_the_user_sees_why_and_how_many() -> None:
    failed = {"event": "episode failed", "reason": "reward_error", "detail": "mine: ValueError:\n\x1b[31mboom\ud800"}
    progress = heard(START, "rollout", {"event": "joined the buffer"})
    for _ in range(3):
        progress = heard(progress, "rollout", failed)
    assert "(rollout: episode failed, 3 so far; the last: reward_error: mine: ValueError:  [31mboom )" in line(progress)
    assert "reward_error" in drawn(progress)
    assert len(line(heard(progress, "rollout", failed | {"detail": "x" * 10_000}))) < 500


def test_an_evaluation_before_the_first_step_means_that_groups_are_being_generated() -> None:
    assert observe(START, EVAL).stage == "generating the first groups"
    assert observe(observe(START, STEP), EVAL).stage == "training"


def test_records_of_other_kinds_change_nothing() -> None:
    assert observe(START, {"kind": "finish"}) == START
    assert observe(START, {}) == START


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
    assert who_waits({"learner_idle_fraction": learner, "generator_idle_fraction": generator}) == words


def test_the_plain_screen_prints_when_enough_time_or_enough_steps_have_passed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def at(elapsed_s: float, step: int) -> Progress:
        return replace(observe(START, {**STEP, "step": step}), elapsed_s=elapsed_s)

    with PlainScreen(every_s=5.0, every_steps=20) as screen:
        for state in (at(1, 1), at(2, 2), at(3, 21), at(4, 40), at(8, 40), at(9, 41)):
            screen.show(state)
    steps = [text.split("step ")[1].split("/")[0] for text in capsys.readouterr().out.splitlines()]
    assert steps == ["1", "21", "40", "41"]  # the last because a run must not end unsaid
