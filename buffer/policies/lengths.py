"""Length histograms and their distance, to detect a length bias of dropped answers."""

from collections import Counter
from collections.abc import Iterable, Mapping


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
