"""The limiter's rule in Python: the reference for the scripts that lease and issue."""

from slipstream.buffer.policies.admission import Bounds

ROUNDING = 1e-6


def may_lease(b: Bounds, *, arrived: int, inserts: int, samples: int, count: int, coming: bool = True) -> bool:
    """Whether `count` further uses keep diff at or above `min_diff`, or no further group can arrive.

    Args:
        arrived: groups that ever became ready.
        coming: an insertion is possible.
    """
    diff = inserts * b.samples_per_insert - samples
    return not coming or (arrived >= b.min_ready and diff - count >= b.min_diff - ROUNDING)


def may_insert(b: Bounds, *, inserts: int, samples: int, count: int) -> bool:
    """Whether `count` further groups keep diff at or below `max_diff`."""
    diff = inserts * b.samples_per_insert - samples
    return diff + count * b.samples_per_insert <= b.max_diff + ROUNDING
