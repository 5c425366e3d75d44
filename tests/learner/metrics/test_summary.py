"""The summary of a run, from its records."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from slipstream.buffer.wire.messages import LedgerCounts, ServerStatus, State
from slipstream.learner.metrics.summary import Metrics, read_records, summarise
from slipstream.learner.metrics.trackers import JsonlTracker

STATE = State(
    request=0, version=7,
    counts=LedgerCounts(issued=12, ready=1, leased=2, trained=4, filtered=2, expired=3, tokens=5000),
    servers=[ServerStatus(busy_s=6.0, up_s=10.0), ServerStatus(busy_s=9.0, up_s=10.0)], evals=[],
)  # fmt: skip


def step(number: int, **figures: Any) -> dict[str, Any]:
    return {
        "kind": "step", "step": number, "policy_version": number, "reward": 0.1 * number, "staleness_mean": 1.0,
        "staleness_max": 2.0, "step_s": 0.5, "wait_s": 0.1, "tokens": 100.0, "ess": 0.9, **figures,
    }  # fmt: skip


def evaluation(number: int, score: float | None, *, coverage: float = 1.0, **figures: Any) -> dict[str, Any]:
    return {
        "kind": "eval", "step": number, "policy_version": number, "score": score, "coverage": coverage,
        "lower_bound": (score or 0.0) * coverage, "eval_s": 0.25, **figures,
    }  # fmt: skip


def summary(records: Sequence[Metrics], **others: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "last_step": max((record["step"] for record in records if record["kind"] == "step"), default=0),
        "policy_version": 7, "state": STATE, "published_s": [0.1, 0.3], "stalls_s": [0.01, 0.02, 0.06], "wall_s": 60.0,
        "startup_s": 20.0, **others,
    }  # fmt: skip
    return summarise(records, **arguments)


def test_figures_are_means_over_steps_and_shares_of_time() -> None:
    records = [step(1, staleness_max=1.0, step_s=0.2), step(2, staleness_max=4.0, staleness_mean=2.0), step(3, ess=0.6)]
    found = summary(records)
    assert (found["steps"], found["policy_version"], found["tokens_trained"]) == (3, 7, 300)
    assert found["staleness_mean"] == pytest.approx(4 / 3)
    assert found["staleness_max"] == 4.0
    assert found["ess_mean"] == pytest.approx(0.8)
    assert found["step_s_median"] == 0.5
    assert found["learner_idle_fraction"] == pytest.approx(0.3 / 1.2)
    assert found["generator_idle_fraction"] == pytest.approx(1 - 15 / 20)
    assert found["tokens_generated"] == 5000
    assert found["weight_sync_s"] == {"mean": pytest.approx(0.2), "max": 0.3}
    assert found["generation_stall_s"] == {"mean": pytest.approx(0.03), "max": 0.06}


@pytest.mark.parametrize(("rewards", "first", "last"), [([0.062, 0.062, 0.0], 0.062, 0.0), ([0.5], 0.5, 0.5)])
def test_short_run_has_rewards_of_its_own_first_and_last_steps(rewards: list[float], first: float, last: float) -> None:
    found = summary([step(number, reward=reward) for number, reward in enumerate(rewards, start=1)])
    assert (found["reward_first"], found["reward_last"]) == (first, last)


def test_first_and_last_reward_are_of_ten_steps_each() -> None:
    found = summary([step(number) for number in range(1, 31)])
    assert found["reward_first"] == pytest.approx(0.55)
    assert found["reward_last"] == pytest.approx(2.55)


def test_last_record_of_repeated_step_counts() -> None:
    records = [step(1), step(2, tokens=999.0), step(3), step(2, tokens=50.0), step(3)]
    found = summary(records)
    assert (found["steps"], found["tokens_trained"]) == (3, 250)


def test_undone_steps_and_their_evaluations_do_not_count() -> None:
    records = [evaluation(0, 0.1), step(1), evaluation(1, 0.2), step(2), step(3, reward=99.0), step(4, reward=99.0)]
    records += [evaluation(3, 0.95), step(2, policy_version=6), evaluation(5, 0.3), evaluation(6, 0.4)]
    found = summary(records, last_step=2, policy_version=6)
    assert (found["steps"], found["policy_version"], found["tokens_trained"]) == (2, 6, 200)
    assert found["reward_last"] == pytest.approx(0.2)
    assert (found["eval_score_first"], found["eval_score"], found["eval_s"]) == (0.1, 0.4, 1.0)
    assert found["time_to_eval_0.9_s"] is None


def test_evaluation_of_initial_weights_always_counts() -> None:
    undone = [evaluation(0, 0.1), step(1, policy_version=0), step(2, policy_version=1)]
    found = summary(
        [*undone, step(1, policy_version=2), step(2, policy_version=3), evaluation(3, 0.5)], policy_version=3
    )
    assert (found["eval_score_first"], found["eval_score"]) == (0.1, 0.5)


def test_time_to_target_is_training_time() -> None:
    records = [evaluation(0, 0.0), step(1), step(2), evaluation(2, 0.89), step(3), evaluation(3, 0.9), step(4)]
    found = summary([*records, evaluation(4, 1.0)], policy_version=4)
    assert found["time_to_eval_0.9_s"] == pytest.approx(1.5)
    assert (found["eval_score_first"], found["eval_score"], found["eval_s"]) == (0.0, 1.0, 1.0)
    assert summary(records, policy_version=4)["eval_score"] is None, "the last version was not evaluated"


def test_failed_held_out_tasks_count_as_0_for_the_target() -> None:
    records = [step(1), evaluation(1, 0.9375, coverage=0.25), step(2), evaluation(2, None, coverage=0.0)]
    found = summary(records, policy_version=2)
    assert (found["eval_score"], found["eval_lower_bound"], found["eval_coverage"]) == (None, 0.0, 0.0)
    found = summary(records[:2], policy_version=1)
    assert (found["eval_score"], found["eval_lower_bound"], found["eval_coverage"]) == (0.9375, 0.234375, 0.25)
    assert found["time_to_eval_0.9_s"] is None


def test_engine_mismatch_is_weighted_by_tokens_and_counts_evaluations() -> None:
    records = [
        step(1, mismatch_tokens=10.0, mismatch_k3=0.2, mismatch_abs=0.1),
        step(2),
        evaluation(2, 0.5, mismatch_tokens=30.0, mismatch_k3=0.6, mismatch_abs=0.5),
    ]
    found = summary(records)
    assert found["engine_mismatch_kl"] == pytest.approx(0.5)
    assert found["engine_mismatch_abs"] == pytest.approx(0.4)
    assert found["engine_mismatch_tokens"] == 40


def test_figures_without_measurements_are_null() -> None:
    found = summary([step(1)], state=structs.replace(STATE, servers=[]), published_s=[], stalls_s=[])
    for key in ("eval_score", "eval_lower_bound", "eval_coverage", "engine_mismatch_kl", "generator_idle_fraction"):
        assert found[key] is None
    assert found["weight_sync_s"] == {"mean": None, "max": None}
    json.dumps(found, allow_nan=False)


def test_figures_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(step(1, mismatch_tokens=10.0, mismatch_k3=0.2, mismatch_abs=0.1))
    tracker.log(step(2, ess=math.nan, mismatch_tokens=10.0, mismatch_k3=math.inf, mismatch_abs=0.3))
    tracker.close()
    found = summary(read_records(tmp_path / "metrics.jsonl"))
    assert found["ess_mean"] == 0.9
    assert found["engine_mismatch_kl"] == pytest.approx(0.2)


def test_only_summarised_fields_of_whole_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({**step(1), "buffer/ready": 3}), json.dumps(step(2))[:30]]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert read_records(path) == [step(1)]
