"""Policy filtration (PF-PPO) and the fit of its strategies."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.buffer.policies.filters import Strategy, filtrate, rank_weights
from slipstream.tools.ledger.filtration_report import r_squared, strategy_fit

STRATEGIES: tuple[Strategy, ...] = ("best_of_n", "best_random", "best_worst", "pow")
finite = st.floats(-1e300, 1e300)
reward_lists = st.lists(finite, min_size=1, max_size=12)
strategies = st.sampled_from(STRATEGIES)


REWARDS = [0.2, 0.8, 0.1, -0.5]


@pytest.mark.parametrize(
    ("strategy", "rewards", "exponent", "expected"),
    [
        ("best_of_n", REWARDS, 1.0, [0, 1, 0, 0]), ("best_random", REWARDS, 1.0, [1 / 6, 1 / 2, 1 / 6, 1 / 6]),
        ("best_worst", REWARDS, 1.0, [0, 1 / 2, 0, 1 / 2]),
        ("pow", REWARDS, 1.0, [0.2 / 1.6, 0.8 / 1.6, 0.1 / 1.6, 0.5 / 1.6]), ("pow", [1, 3], 2.0, [0.1, 0.9]),
        ("pow", [0, 0, 0, 0], 2.0, [0.25] * 4),
    ],
)  # fmt: skip
def test_weights_match_paper(strategy: Strategy, rewards: list[float], exponent: float, expected: list[float]) -> None:
    assert rank_weights(rewards, strategy=strategy, exponent=exponent) == pytest.approx(expected)


def test_ties_rank_by_index() -> None:
    assert rank_weights([0, 1, 1, 0], strategy="best_worst", exponent=1.0).tolist() == [0, 0.5, 0, 0.5]
    assert rank_weights([1, 1, 1], strategy="best_of_n", exponent=1.0).tolist() == [1, 0, 0]


@given(rewards=reward_lists, strategy=strategies, exponent=st.floats(0.1, 5))
def test_weights_are_a_distribution(rewards: list[float], strategy: Strategy, exponent: float) -> None:
    weights = rank_weights(rewards, strategy=strategy, exponent=exponent)
    assert weights.shape == (len(rewards),)
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1.0)


@given(rewards=st.lists(finite, min_size=2, max_size=12, unique=True), strategy=strategies, data=st.data())
def test_weights_are_permutation_equivariant(rewards: list[float], strategy: Strategy, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(rewards))))
    shuffled = rank_weights([rewards[index] for index in order], strategy=strategy, exponent=1.0)
    assert shuffled == pytest.approx(rank_weights(rewards, strategy=strategy, exponent=1.0)[list(order)])


@pytest.mark.parametrize("rewards", [[], [math.nan, 1.0], [math.inf, 0.0]])
def test_rewards_without_rank_are_refused(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        rank_weights(rewards, strategy="best_of_n", exponent=1.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_draw_frequencies_match_weights(strategy: Strategy) -> None:
    rewards, draws = [0.1, 0.9, 0.4], 20_000
    drawn = filtrate(rewards, strategy=strategy, exponent=1.0, keep=draws, rng=np.random.default_rng(7))
    counts = Counter(drawn)
    weights = rank_weights(rewards, strategy=strategy, exponent=1.0)
    assert len(drawn) == draws
    assert [counts[index] / draws for index in range(3)] == pytest.approx(weights, abs=0.02)
    assert all(counts[index] == 0 for index in range(3) if weights[index] == 0)


def test_draws_are_reproducible() -> None:
    first, second = (
        filtrate([3, 1, 2], strategy="best_random", exponent=1.0, keep=9, rng=np.random.default_rng(1)) for _ in "ab"
    )
    assert first == second
    assert list(first) == sorted(first)


@given(rewards=st.lists(st.integers(-50, 50), min_size=3, max_size=20), data=st.data())
def test_r_squared_matches_least_squares(rewards: list[int], data: st.DataObject) -> None:
    size = len(rewards)
    scores = data.draw(st.lists(st.integers(-50, 50), min_size=size, max_size=size).filter(lambda s: len({*s}) > 1))
    weights = np.array(data.draw(st.lists(st.integers(1, 9), min_size=size, max_size=size)), dtype=np.float64)
    design = np.stack([np.ones(size), np.array(rewards, dtype=np.float64)], axis=1)
    root = np.sqrt(weights)
    line, *_ = np.linalg.lstsq(design * root[:, None], np.array(scores) * root, rcond=None)
    residual = weights @ (np.array(scores) - design @ line) ** 2
    total = weights @ (np.array(scores) - np.average(scores, weights=weights)) ** 2
    assert r_squared(rewards, scores, weights_A=weights) == pytest.approx(1 - residual / total, abs=1e-9)


def test_r_squared_of_constants() -> None:
    for same in (0.0, 1.0, 1e6):
        assert r_squared([same, same, same + 1e-13 * same], [0, 1, 2]) == 0.0
        assert math.isnan(r_squared([0, 1, 2], [same, same, same + 1e-13 * same]))
    assert math.isnan(r_squared([0, 1, 2], [1, 1, 5], weights_A=np.array([1.0, 1.0, 0.0])))


def test_r_squared_is_scale_and_shift_invariant() -> None:
    known = r_squared([0, 1, 3], [0, 2, 1])
    assert 0 < known < 1
    assert r_squared([-1e200, 0, 2e200], [7, 9, 8]) == pytest.approx(known)
    assert r_squared([1e6, 1e6 + 1, 1e6 + 3], [0, 2e200, 1e200]) == pytest.approx(known)


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rewards"):
        r_squared([1, 2], [1])
    with pytest.raises(ValueError, match="0 rewards"):
        r_squared([], [])
    with pytest.raises(ValueError, match="2 rewards"):
        strategy_fit([([1.0, 2.0], [1.0])], strategy=None)


def test_fit_uses_bin_averages() -> None:
    noisy = [([0.0, 0.0, 1.0, 1.0, 2.0, 2.0], [-1.0, 1.0, 0.0, 2.0, 1.0, 3.0])]
    assert strategy_fit(noisy, strategy=None, bins=3) == pytest.approx(1.0)
    assert strategy_fit(noisy, strategy=None, bins=None) == pytest.approx(0.4)


def test_equal_rewards_share_a_bin() -> None:
    rng = np.random.default_rng(9)
    groups = [(rng.integers(0, 5, 6).tolist(), rng.normal(size=6).tolist()) for _ in range(40)]
    fit = strategy_fit(groups, strategy=None, bins=8)
    assert fit == pytest.approx(strategy_fit(groups[::-1], strategy=None, bins=8))
    by_value = [
        [s for rewards, scores in groups for r, s in zip(rewards, scores, strict=True) if r == v] for v in range(5)
    ]
    assert fit == pytest.approx(r_squared(range(5), [float(np.mean(scores)) for scores in by_value]))


def test_fit_of_two_points_is_nan() -> None:
    assert math.isnan(strategy_fit([([0, 1, 0, 1], [0, 1, 0, 0])], strategy=None))
    assert math.isnan(strategy_fit([([0, 1, 2], [0, 5, 1])], strategy="best_worst", bins=None))
    assert math.isnan(strategy_fit([], strategy=None))
