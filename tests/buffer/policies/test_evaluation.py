"""Estimates of an evaluation against simulation and hand-made cases."""

import math

import numpy as np
import pytest

from slipstream.buffer.policies.statistics import estimate, estimates, tally, task_scores


def test_one_answer_per_task_has_a_mean_only() -> None:
    assert task_scores([[1.0], [0.0]], [None, None]) == {"score": [1.0, 0.0]}


def test_several_answers_give_mean_best_and_majority() -> None:
    scores = task_scores([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]], [0.0, 1.0])
    assert scores == {"score": [0.25, 0.75], "pass_at_k": [1.0, 1.0], "maj_at_k": [0.0, 1.0]}


def test_unknown_majority_is_left_out() -> None:
    assert "maj_at_k" not in task_scores([[1.0, 0.0], [0.0, 0.0]], [1.0, None])


@pytest.mark.parametrize("samples", [1, 4])
def test_interval_covers_the_true_mean_95_times_of_100(samples: int) -> None:
    """Tasks of unequal difficulty, whose answers are not independent of each other."""
    rng, tasks, runs = np.random.default_rng(3), 200, 400
    covered = 0
    for _ in range(runs):
        answers = rng.random((tasks, samples)) < rng.beta(0.5, 0.5, size=(tasks, 1))
        total, squares = tally(task_scores(answers.astype(float).tolist(), [None] * tasks)["score"])
        mean, interval = estimate(total, squares, tasks)
        covered += abs(mean - 0.5) <= interval
    assert covered / runs == pytest.approx(0.95, abs=0.035)


def test_estimates_of_no_or_equal_tasks_are_finite() -> None:
    assert estimate(0.0, 0.0, 0) == (0.0, 0.0)
    assert estimates({"score": (3.0, 3.0)}, 3) == {"score": 1.0, "score_interval": 0.0}
    assert estimate(1e15, 1e30, 1) == (1e15, 0.0)
    assert math.isfinite(estimate(0.3, 0.03, 3)[1])
