"""Estimates of an evaluation from the rewards of its tasks, each answered k times."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

NORMAL_95 = 1.96


def task_scores(rewards: Sequence[Sequence[float]], majority: Sequence[float | None]) -> dict[str, list[float]]:
    """Scores of each task by estimate: `score` (mean@k) and, for more than one answer, `pass_at_k` and `maj_at_k`.

    Args:
        rewards: of the k answers to each task. pass@k is the best of them: for rewards of 0 and 1 the unbiased estimate
            of Chen et al. 2021 (arXiv 2107.03374, eq. 1) at n = k.
        majority: reward of the answer that most of the k agree on (Wang et al. 2022, arXiv 2203.11171); None: unknown.
    """
    scores = {"score": [fmean(of_task) for of_task in rewards]}
    if all(len(of_task) > 1 for of_task in rewards):
        scores["pass_at_k"] = [max(of_task) for of_task in rewards]
        voted = [reward for reward in majority if reward is not None]
        if len(voted) == len(rewards):
            scores["maj_at_k"] = voted
    return scores


def tally(values: Sequence[float]) -> tuple[float, float]:
    """Sum and sum of squares."""
    return sum(values), sum(value * value for value in values)


def estimate(total: float, squares: float, tasks: int) -> tuple[float, float]:
    """Mean over the tasks, and half the width of its 95 % interval; (0, 0) without tasks.

    The interval is that of the central limit theorem over tasks, whose answers are not independent of each other
    (Miller 2024, arXiv 2411.00640, §2.2); 0 for one task, or if all tasks score alike.
    """
    if not tasks:
        return 0.0, 0.0
    mean = total / tasks
    variance = max(0.0, squares / tasks - mean**2) * tasks / max(1, tasks - 1)
    return mean, NORMAL_95 * math.sqrt(variance / tasks)


def estimates(tallies: Mapping[str, tuple[float, float]], tasks: int) -> dict[str, float]:
    """`<name>` and `<name>_interval` of each estimate, from its tally over all tasks."""
    figures = {}
    for name, (total, squares) in tallies.items():
        figures[name], figures[f"{name}_interval"] = estimate(total, squares, tasks)
    return figures
