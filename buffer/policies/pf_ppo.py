"""Policy filtration (PF-PPO): resampling of answers by the rank of their reward, and the choice of a strategy.

Source: Zhang et al. 2025, "Policy Filtration for RLHF to Mitigate Noise in Reward Models", arXiv 2409.06957v5.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# N answers of a group, A answers of all groups, B groups of answers with similar rewards

Strategy = Literal["best_of_n", "best_random", "best_worst", "pow"]


def rank_weights(rewards_N: Sequence[float], *, strategy: Strategy, exponent: float) -> NDArray[np.float64]:
    """Probability of drawing each answer of one prompt, in the order of `rewards_N`; shape [N], sum 1.

    Answers are ranked by falling reward; of equal rewards the lower index ranks higher.

    best_of_n    (1, 0, …, 0)
    best_random  (½, ½/(N-1), …, ½/(N-1))
    best_worst   (½, 0, …, 0, ½)
    pow          |reward|^exponent, normalised; uniform if all rewards are zero. Needs no rank.

    A single answer has weight 1 with every strategy.

    Raises: ValueError if there are no rewards, or one is not finite.
    Source: arXiv 2409.06957, §4 (weight vectors) and §5.4 (PPO-pow-k).
    """
    rewards = np.asarray(rewards_N, dtype=np.float64)
    answers = rewards.size
    if answers == 0 or not np.isfinite(rewards).all():
        raise ValueError(f"rewards={list(rewards_N)} must be one finite number or more")
    if answers == 1:
        return np.ones(1)
    if strategy == "pow":
        return _power_weights(np.abs(rewards), exponent)
    ranked = np.argsort(-rewards, kind="stable")
    weights = np.zeros(answers)
    match strategy:
        case "best_of_n":
            weights[ranked[0]] = 1.0
        case "best_random":
            weights[:] = 0.5 / (answers - 1)
            weights[ranked[0]] = 0.5
        case "best_worst":
            weights[ranked[[0, -1]]] = 0.5
    return weights


def _power_weights(sizes_N: NDArray[np.float64], exponent: float) -> NDArray[np.float64]:
    largest = sizes_N.max()
    if largest == 0:
        return np.full(sizes_N.size, 1 / sizes_N.size)
    powers: NDArray[np.float64] = (sizes_N / largest) ** exponent  # scaled first: no overflow, and the same weights
    powers /= powers.sum()
    return powers


def filtrate(
    rewards_N: Sequence[float], *, strategy: Strategy, exponent: float, keep: int, rng: np.random.Generator
) -> tuple[int, ...]:
    """Draws `keep` answers by their `rank_weights`, with replacement; indices, ascending.

    Raises: ValueError if there are no rewards, or one is not finite.
    Source: arXiv 2409.06957, §4 (draws from the filtered policy).
    """
    weights = rank_weights(rewards_N, strategy=strategy, exponent=exponent)
    return tuple(sorted(rng.choice(weights.size, size=keep, p=weights).tolist()))


def r_squared(
    rewards_A: Sequence[float] | NDArray[np.float64],
    true_scores_A: Sequence[float] | NDArray[np.float64],
    *,
    weights_A: NDArray[np.float64] | None = None,
) -> float:
    """The share of the true scores' variance that a linear function of the reward explains, 0 to 1.

    1 - Σ w (s - ŝ)² / Σ w (s - s̄)² with ŝ the least-squares line through the rewards, weighted by `weights_A` (all 1
    if unset). 0 if only the rewards are all equal; NaN if the true scores are, since there is nothing to explain.

    Raises: ValueError if the lengths differ or are 0.
    Source: Draper & Smith 1998; arXiv 2409.06957, §4 (weight choice).
    """
    rewards, scores = np.asarray(rewards_A, dtype=np.float64), np.asarray(true_scores_A, dtype=np.float64)
    weights = np.ones(rewards.size) if weights_A is None else weights_A
    if rewards.size == 0 or not rewards.size == scores.size == weights.size:
        raise ValueError(
            f"{rewards.size} rewards, {scores.size} true scores and {weights.size} weights must be as many"
        )
    used = weights > 0
    rewards, scores, weights = rewards[used], scores[used], weights[used] / weights.sum()
    if _all_equal(scores):
        return math.nan
    if _all_equal(rewards):
        return 0.0
    # Neither unit nor origin matters, and squares of values between 0 and 1 don't overflow.
    rewards, scores = (rewards - rewards.min()) / np.ptp(rewards), (scores - scores.min()) / np.ptp(scores)
    rewards, scores = rewards - weights @ rewards, scores - weights @ scores
    explained = (weights @ (rewards * scores)) ** 2 / (weights @ rewards**2)  # of a least-squares line
    return float(np.clip(explained / (weights @ scores**2), 0, 1))


def _all_equal(values: NDArray[np.float64]) -> bool:
    # Not exactly: averages of equal values differ in their last digits, and those would be explained as well.
    return bool(np.ptp(values) <= 1e-12 * np.abs(values).max())


def strategy_fit(
    groups: Sequence[tuple[Sequence[float], Sequence[float]]],
    *,
    strategy: Strategy | None,
    exponent: float = 1.0,
    bins: int | None = 20,
) -> float:
    """R² between reward and true score on the answers that a strategy uses; the strategy with most is promising.

    Args:
        groups: Rewards [N] and true scores [N] of each prompt's answers.
        strategy: None: no filter, every answer counts alike.
        bins: Answers with similar rewards are averaged, and each such average is one point, as in the paper. It
            doesn't say how it groups them; here into so many groups of about equal probability, by the order of their
            rewards, equal rewards together. Groups of equal width would let the few answers that a strategy leaves
            in between count as much as all others. None: every answer is a point.

    The paper draws answers from the filtered policy; here each answer is weighted with its probability of being
    drawn. An average of drawn answers tends to the weighted average, so this is the same without the chance.

    NaN if the points have all the same true score, or are fewer than three: a line fits any two.

    Raises: ValueError if a group has no answers, another number of rewards than of true scores, or a reward that is
        not finite.
    Source: arXiv 2409.06957, §4 (weight choice, table 1) and §5.4 (table 3).
    """
    for rewards_N, scores_N in groups:
        if len(rewards_N) != len(scores_N):
            raise ValueError(f"a group has {len(rewards_N)} rewards but {len(scores_N)} true scores")
    if not groups:
        return math.nan
    weights = np.concatenate([_use(rewards_N, strategy, exponent) for rewards_N, _ in groups])
    rewards = np.concatenate([np.asarray(rewards_N, dtype=np.float64) for rewards_N, _ in groups])
    scores = np.concatenate([np.asarray(scores_N, dtype=np.float64) for _, scores_N in groups])
    if bins is None:
        return r_squared(rewards, scores, weights_A=weights) if np.count_nonzero(weights) > 2 else math.nan
    bin_of = _bins_of_equal_weight(rewards, weights, bins)
    weight_B = np.bincount(bin_of, weights, bins)
    filled = weight_B > 0
    if np.count_nonzero(filled) < 3:
        return math.nan
    reward_B = np.bincount(bin_of, weights * rewards, bins)[filled] / weight_B[filled]
    score_B = np.bincount(bin_of, weights * scores, bins)[filled] / weight_B[filled]
    return r_squared(reward_B, score_B)


def _bins_of_equal_weight(
    rewards_A: NDArray[np.float64], weights_A: NDArray[np.float64], bins: int
) -> NDArray[np.int64]:
    _, value_of = np.unique(rewards_A, return_inverse=True)
    weight_of_value = np.bincount(value_of, weights_A)
    middle = np.cumsum(weight_of_value) - weight_of_value / 2
    bin_of_value: NDArray[np.int64] = np.minimum(middle / weight_of_value.sum() * bins, bins - 1).astype(np.int64)
    bin_of: NDArray[np.int64] = bin_of_value[value_of]
    return bin_of


def _use(rewards_N: Sequence[float], strategy: Strategy | None, exponent: float) -> NDArray[np.float64]:
    if strategy is None:
        return np.full(len(rewards_N), 1 / len(rewards_N))
    return rank_weights(rewards_N, strategy=strategy, exponent=exponent)
