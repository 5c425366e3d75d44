"""Statistics of answers: histograms of their lengths and their distance, and estimates of an evaluation."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean


def bucket(tokens: int) -> int:
    """The shortest length in the bucket of `tokens`: itself below 64, then 16 buckets of equal width to an octave.

    A length exceeds its bucket by less than 1/17 of itself (5.9 %).

    Raises: ValueError if `tokens` is negative.
    """
    if tokens < 0:
        raise ValueError(f"tokens={tokens} must not be negative")
    if tokens < 64:
        return tokens
    dropped_bits = tokens.bit_length() - 5
    return tokens >> dropped_bits << dropped_bits


def histogram(lengths: Iterable[int]) -> dict[int, int]:
    """Number of lengths in each bucket, in ascending order; without empty buckets.

    Raises: ValueError if a length is negative.
    """
    return dict(sorted(Counter(map(bucket, lengths)).items()))


def ks_distance(a: Mapping[int, int], b: Mapping[int, int]) -> float:
    """The two-sample Kolmogorov-Smirnov statistic of two histograms, sup |F_a - F_b|, 0 to 1; 0 if one is empty.

    Exact for the bucketed lengths; at most the statistic of the lengths themselves, since it compares fewer points.

    Source: Smirnov 1939; https://en.wikipedia.org/wiki/Kolmogorov-Smirnov_test.
    """
    total_a, total_b = sum(a.values()), sum(b.values())
    if not total_a or not total_b:
        return 0.0
    distance, up_to_a, up_to_b = 0.0, 0, 0
    for key in sorted(a.keys() | b.keys()):
        up_to_a += a.get(key, 0)
        up_to_b += b.get(key, 0)
        distance = max(distance, abs(up_to_a / total_a - up_to_b / total_b))
    return distance


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
    named = dict[str, float]()
    for name, (total, squares) in tallies.items():
        named[name], named[f"{name}_interval"] = estimate(total, squares, tasks)
    return named
