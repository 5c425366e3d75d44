"""The state, the views and the screens of a run's progress."""

import os
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slipstream.tools.launch.progress import Plan, Progress, apply_log, apply_metrics, bottleneck, line, table
from slipstream.tools.launch.screens import LiveScreen, PlainScreen, make_screen

START = Progress(Plan("demo", steps=400, max_staleness=4, eval_name="exact_match"))
STEP: dict[str, Any] = {
    "kind": "step", "time_s": 12.3, "step": 17, "steps": 400, "policy_version": 18, "reward": 0.412,
    "score/exact_match": 0.053, "staleness_mean": 1.21, "staleness_max": 3, "step_s": 0.065,
    "learner_idle_fraction": 0.06, "generator_idle_fraction": 0.21, "tokens_generated_per_s": 11900.0,
    "tokens_trained_per_s": 23600.0, "weight_sync_s": 0.02, "generation_stall_s": 0.011,
    "buffer/in_flight": 64, "buffer/ready": 12, "buffer/leased": 32, "buffer/trained": 5440,
}  # fmt: skip
EVAL: dict[str, Any] = {"kind": "eval", "time_s": 11.0, "policy_version": 16, "score": 0.93, "coverage": 1.0}
DIED = {"event": "engine died", "level": "warning", "timestamp": "noon", "server": "r0", "reason": "NaN", "count": 5}


def drawn(progress: Progress, *, width: int = 100) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table(progress))
    return capture.get()


def test_table_shows_all_figures_of_a_step() -> None:
    text = drawn(apply_metrics(apply_metrics(replace(START, elapsed_s=75.0), STEP), EVAL))
    for part in (
        "demo",
        "1:15",
        "17 of 400",
        "policy version 18",
        "0.412",
        "exact-match 0.053",
        "greedy 0.930 (version 16)",
        "mean 1.21",
        "max 3",
        "limit 4",
        "in flight 64",
        "ready 12",
        "leased 32",
        "0.065 s per step",
        "11,900 generated",
        "23,600 trained",
        "learner 6%",
        "generator 21%",
        "generator waits",
        "sync 20 ms",
        "generation stalled 11 ms",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        (STEP | {"throttle/max_staleness": 1}, ["(limit 4, throttled to 1)"]),
        (STEP | {"throttle/max_staleness": 4}, ["(limit 4)"]),
        ({"kind": "step", "step": 1, "reward": None, "step_s": "soon"}, ["1 of 400", "- s per step"]),
        ({"kind": "step", "step": 1, "tokens": 1536, "step_s": 0.5}, ["3,072 trained"]),
    ],
    ids=["throttled", "not throttled", "missing and invalid", "computed rate"],
)
def test_table_shows_derived_and_missing_figures(record: dict[str, Any], shown: list[str]) -> None:
    text = drawn(apply_metrics(START, record))
    assert all(part in text for part in shown)


def test_stage_and_messages_are_shown_before_the_first_step() -> None:
    progress = replace(START, stage="waiting for Redis at [fd00::1]", messages={"rollout": "loading [weights]"})
    assert "waiting for Redis at [fd00::1] …" in drawn(progress)
    assert "loading [weights]" in drawn(progress)
    assert line(progress).endswith("waiting for Redis at [fd00::1] (rollout: loading [weights])")


def test_failed_groups_are_counted_with_their_reason() -> None:
    failed = {"event": "episode failed", "reason": "reward_error", "detail": "mine: ValueError:\n\x1b[31mboom\ud800"}
    progress = apply_log(START, "rollout", {"event": "joined the buffer"})
    for _ in range(3):
        progress = apply_log(progress, "rollout", failed)
    assert "episode failed, 3 so far; the last: reward_error: mine: ValueError:  [31mboom )" in line(progress)
    assert "reward_error" in drawn(progress)
    assert len(line(apply_log(progress, "rollout", failed | {"detail": "x" * 10_000}))) < 500
    repeated = {"event": "group failed", "level": "warning", "reason": "reward_error", "detail": "boom"}
    assert apply_log(progress, "buffer", repeated) == progress


def test_warnings_are_shown_during_training_with_their_fields() -> None:
    calm = apply_metrics(START, STEP)
    progress = apply_log(calm, "rollout", DIED)
    progress = apply_log(progress, "rollout", {"event": "engine [ready]", "level": "info"})
    assert line(progress).removeprefix(line(calm)) == " (rollout: engine died (reason: NaN; count: 5))"
    assert "rollout    engine died (reason: NaN; count: 5)" in drawn(progress)
    evicted = {"event": "rollout server evicted", "level": "warning", "server": "r1", "reason": "slow"}
    assert "learner: rollout server evicted (server: r1; reason: slow)" in line(apply_log(START, "learner", evicted))


def test_warning_disappears_with_the_first_step_after_a_minute() -> None:
    progress = apply_log(replace(apply_metrics(START, STEP), elapsed_s=100.0), "rollout", DIED)
    for elapsed_s in (159.0, 500.0):
        assert "engine died" in line(replace(progress, elapsed_s=elapsed_s))
    assert "engine died" in line(apply_metrics(replace(progress, elapsed_s=159.0), STEP))
    assert "engine died" not in line(apply_metrics(replace(progress, elapsed_s=161.0), STEP))


@pytest.mark.parametrize(("step_s", "stalled_s", "usual_s"), [(0.1, 11.0, 9.0), (30.0, 91.0, 89.0), (None, 11.0, 9.0)])
def test_stalled_run_shows_the_time_without_a_step(step_s: float | None, stalled_s: float, usual_s: float) -> None:
    progress = apply_metrics(replace(START, elapsed_s=40.0), STEP | {"step_s": step_s})
    for view in (line, drawn):
        assert "generator waits" in view(replace(progress, elapsed_s=40.0 + usual_s))
        stalled = view(replace(progress, elapsed_s=40.0 + stalled_s))
        assert f"no step for {stalled_s:.0f} s" in stalled
        assert "waits" not in stalled


@pytest.mark.parametrize(("filtered", "shown"), [(1484, "filtered 94%"), (15, ""), (0, "")])
def test_filtered_share_is_shown_from_one_percent(filtered: int, shown: str) -> None:
    progress = apply_metrics(START, STEP | {"buffer/issued": 1583, "buffer/filtered": filtered})
    for text in (line(progress), drawn(progress)):
        assert shown in text
        assert ("filtered" in text) == bool(shown)


def test_table_with_long_warnings_fits_a_small_terminal() -> None:
    progress = apply_metrics(START, STEP | {"buffer/issued": 1583, "buffer/filtered": 1484})
    for name in ("rollout", "learner"):
        progress = apply_log(progress, name, DIED | {"reason": "x " * 1000})
    assert len(drawn(progress, width=80).splitlines()) <= 24


def test_joined_server_starts_generation_before_the_first_step() -> None:
    joined = {"event": "joined the buffer", "level": "info", "version": 0}
    assert apply_log(START, "rollout", joined).stage == "generating the first groups"
    assert apply_log(apply_metrics(START, STEP), "rollout", joined).stage == "training"


def test_other_records_change_nothing() -> None:
    assert apply_metrics(START, {"kind": "finish"}) == apply_metrics(START, {}) == START


@pytest.mark.parametrize(("name", "score"), [(None, ""), ("digit_match", ""), ("exact_match", "exact-match 0.053, ")])
def test_evaluated_score_of_the_batch_is_shown_if_present(name: str | None, score: str) -> None:
    shown = line(apply_metrics(apply_metrics(replace(START, plan=replace(START.plan, eval_name=name)), STEP), EVAL))
    assert f"reward 0.412  {score}greedy 0.930 (version 16)" in shown


@pytest.mark.parametrize(("score", "shown"), [(0.9375, "greedy 0.938"), (None, "greedy -")])
def test_incomplete_evaluation_shows_coverage_and_lower_bound(score: float | None, shown: str) -> None:
    record = EVAL | {"score": score, "coverage": 0.25, "lower_bound": 0.234}
    progress = apply_metrics(apply_metrics(START, STEP), record)
    for text in (line(progress), " ".join(drawn(progress).replace("│", " ").split())):
        assert shown in text
        assert "25%" in text
        assert "0.234" in text


@pytest.mark.parametrize(
    ("learner", "generator", "shown"),
    [(0.4, 0.0, "learner waits"), (0.0, 0.4, "generator waits"), (0.10, 0.12, "balanced"), (None, 0.4, "")],
)
def test_bottleneck(learner: float | None, generator: float, shown: str) -> None:
    assert bottleneck({"learner_idle_fraction": learner, "generator_idle_fraction": generator}).startswith(shown)
    assert bool(bottleneck({"learner_idle_fraction": learner, "generator_idle_fraction": generator})) == bool(shown)


def test_plain_screen_prints_after_enough_time_or_steps(capsys: pytest.CaptureFixture[str]) -> None:
    def at(elapsed_s: float, step: int) -> Progress:
        return replace(apply_metrics(START, {**STEP, "step": step}), elapsed_s=elapsed_s)

    with PlainScreen() as screen:
        for state in (at(1, 1), at(2, 2), at(3, 21), at(4, 40), at(8, 40), at(9, 41)):
            screen.show(state)
    steps = [text.split("step ")[1].split("/")[0] for text in capsys.readouterr().out.splitlines()]
    assert steps == ["1", "21", "40", "41"]  # the last state is always printed


def test_plain_screen_repeats_an_unchanged_line_each_minute(capsys: pytest.CaptureFixture[str]) -> None:
    training = apply_metrics(START, STEP | {"step_s": 100.0})
    with PlainScreen() as screen:
        for elapsed_s in range(1, 150):
            screen.show(replace(training, elapsed_s=float(elapsed_s)))
    assert [float(text.split(" s  ")[0]) for text in capsys.readouterr().out.splitlines()] == [1.0, 61.0, 121.0]


def test_plain_screen_prints_a_message_once(capsys: pytest.CaptureFixture[str]) -> None:
    starting = apply_log(START, "buffer", {"event": "ready", "level": "info"})
    loading = apply_log(starting, "rollout", {"event": "loading", "level": "info"})
    warned = apply_log(apply_metrics(loading, STEP), "learner", {"event": "slow disk", "level": "warning"})
    with PlainScreen() as screen:
        for elapsed_s, state in (
            (1, starting),
            (62, starting),
            (68, loading),
            (70, warned),
            (76, warned),
            (140, warned),
        ):
            screen.show(replace(state, elapsed_s=float(elapsed_s)))
    found = [
        [word for word in ("ready", "loading", "slow disk") if word in text]
        for text in capsys.readouterr().out.splitlines()
    ]
    assert found == [["ready"], [], ["loading"], ["slow disk"], []]


@pytest.mark.parametrize(
    ("terminal", "plain", "screen"),
    [
        ("xterm-256color", False, LiveScreen), ("xterm-256color", True, PlainScreen), ("dumb", False, PlainScreen),
        ("unknown", False, PlainScreen),
    ],
)  # fmt: skip
def test_live_screen_needs_a_capable_terminal(
    terminal: str, plain: bool, screen: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TERM", terminal)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal of colours; a file stays a file
    with (tmp_path / "out").open("w") as stdout, redirect_stdout(stdout):
        assert isinstance(make_screen(plain=False), PlainScreen)
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    ours, theirs = os.openpty()
    with open(theirs, "w") as stdout, redirect_stdout(stdout):  # noqa: PTH123  (it has no path)
        assert isinstance(make_screen(plain=plain), screen)
    os.close(ours)
