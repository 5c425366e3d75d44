"""Bounds on the ratio of uses to insertions: Reverb's SampleToInsertRatio.

    diff = inserts · samples_per_insert - samples

A lease of `count` groups is allowed while diff - count >= min_diff and inserts >= min_ready; an insertion of `count`
groups while diff + count · samples_per_insert <= max_diff, with
min_diff, max_diff = min_ready · samples_per_insert -/+ tolerance. Until `min_ready` groups are in, nothing is leased
so diff can't exceed max_diff: Reverb's extra rule, free insertions until then, is not needed.

Counts: `inserts` are the groups that became ready and are still in the buffer, `samples` are the uses of these.
A group that leaves (used up or expired) is subtracted from both with its uses, and a returned lease subtracts its
samples; otherwise diff would keep groups that can't be used any more, and insertions or leases would stop for good. So
diff is the distance of the groups in the buffer from `samples_per_insert` uses each. `min_ready` counts all groups that
ever became ready.

Reverb can always insert. Here admission (lua/issue.lua) stops insertions while there are enough groups, so a lease
waits only while a group can arrive: with nothing in flight and no ticket allowed, it takes the ready groups.

The bounds are applied atomically in lua/lease.lua and lua/issue.lua.

Source: Cassirer et al. 2021, "Reverb", arXiv 2102.04736; reverb/cc/rate_limiter.cc, reverb/rate_limiters.py.
"""

import math
from dataclasses import dataclass

from slipstream.configs.schema.buffer import LimiterConfig


@dataclass(frozen=True)
class Bounds:
    """Bounds of diff."""

    min_diff: float
    """Uses; leases stop here."""
    max_diff: float
    """Uses; insertions stop here."""
    samples_per_insert: float
    """Uses per inserted group; 0 where diff is not bounded."""
    min_ready: int
    """Insertions before the first lease."""


def bounds(limiter: LimiterConfig) -> Bounds:
    """The bounds that the limiter sets; none of diff without `samples_per_insert` (Reverb's MinSize)."""
    if limiter.samples_per_insert is None:
        return Bounds(-math.inf, math.inf, 0.0, limiter.min_ready)
    middle = limiter.min_ready * limiter.samples_per_insert
    return Bounds(middle - limiter.tolerance, middle + limiter.tolerance, limiter.samples_per_insert, limiter.min_ready)


UNBOUNDED = bounds(LimiterConfig())
