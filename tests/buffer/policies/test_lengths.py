"""Length histograms."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.buffer.policies.statistics import bucket, histogram, ks_distance

lengths = st.integers(0, 2**24)
length_lists = st.lists(lengths, min_size=1, max_size=40)


def exact_ks(a: Sequence[int], b: Sequence[int]) -> float:
    """The Kolmogorov-Smirnov statistic by its definition."""
    return max(abs(float(np.mean(np.array(a) <= x) - np.mean(np.array(b) <= x))) for x in {*a, *b})


@given(st.integers(0, 64) | lengths)
def test_bucket_error_is_bounded(tokens: int) -> None:
    assert 0 <= tokens - bucket(tokens) <= tokens / 17
    assert bucket(bucket(tokens)) == bucket(tokens)
    assert tokens > 64 or bucket(tokens) == tokens


@given(lengths, lengths)
def test_buckets_are_monotonic(one: int, other: int) -> None:
    assert bucket(min(one, other)) <= bucket(max(one, other))


@pytest.mark.parametrize("octave", [64, 128, 1024, 2**15])
def test_octave_has_sixteen_buckets(octave: int) -> None:
    assert len({bucket(tokens) for tokens in range(octave, 2 * octave)}) == 16


def test_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens=-1"):
        bucket(-1)


@given(st.lists(lengths))
def test_histogram_counts_every_length_once(values: list[int]) -> None:
    counted = histogram(values)
    assert sum(counted.values()) == len(values)
    assert list(counted) == sorted(counted)
    assert all(counted.values())


@given(length_lists, length_lists)
def test_ks_distance_of_buckets_is_exact(a: list[int], b: list[int]) -> None:
    distance = ks_distance(histogram(a), histogram(b))
    assert distance == pytest.approx(exact_ks([bucket(x) for x in a], [bucket(x) for x in b]))
    assert distance <= exact_ks(a, b) + 1e-12
    assert distance == ks_distance(histogram(b), histogram(a))


def test_ks_distance_of_long_lengths_is_close() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.lognormal(6, 1, 5000).astype(int).tolist(), rng.lognormal(6.3, 1, 5000).astype(int).tolist()
    assert ks_distance(histogram(a), histogram(b)) == pytest.approx(exact_ks(a, b), abs=0.02)


def test_ks_distance_extremes() -> None:
    assert ks_distance(histogram([1, 2, 3]), histogram([1, 2, 3])) == 0.0
    assert ks_distance(histogram([1, 2]), histogram([1000, 2000])) == 1.0
    assert ks_distance({}, histogram([1])) == 0.0
    assert ks_distance(histogram([1]), {}) == 0.0
