"""How far uses and insertions may run ahead of each other: Reverb's SampleToInsertRatio.

    diff = inserts · samples_per_insert - samples

A lease of `count` groups is allowed while diff - count >= min_diff and inserts >= min_ready; an insertion of `count`
groups while diff + count · samples_per_insert <= max_diff, with
min_diff, max_diff = min_ready · samples_per_insert -/+ tolerance. Until `min_ready` groups are in, nothing is leased
and so diff can't pass max_diff: Reverb's extra rule, that insertions are free until then, holds by itself.

What the caller counts: `inserts` are the groups that became ready and are still there, `samples` are the uses of these.
A group that leaves (it has had its uses, or expires) takes its insert and its uses out of both, and a lease that comes
back takes back its samples; otherwise diff keeps what nobody can ever use, or has used too much, and insertions or
leases stop for good. So diff says how far the groups that are there are from `samples_per_insert` uses each.
`min_ready` looks at all groups that ever became ready.

Reverb can always insert. Here admission (lua/issue.lua) stops insertions as long as enough groups are there, so a lease
waits for them only while one may come: when nothing is in flight and nothing may be issued, it takes what there is.

The two scripts that lease and issue (lua/lease.lua, lua/issue.lua) do this where it is atomic.

Source: Cassirer et al. 2021, "Reverb", arXiv 2102.04736; reverb/cc/rate_limiter.cc, reverb/rate_limiters.py.
"""

import math
from dataclasses import dataclass

from slipstream.configs.schema.buffer import LimiterConfig


@dataclass(frozen=True)
class Bounds:
    """What diff is held to."""

    min_diff: float
    """Uses; leases stop here."""
    max_diff: float
    """Uses; insertions stop here."""
    samples_per_insert: float
    """Uses per inserted group; 0 where diff is not bounded."""
    min_ready: int
    """Groups that are inserted before the first lease."""


def bounds(limiter: LimiterConfig) -> Bounds:
    """The bounds that the limiter sets; none of diff without `samples_per_insert` (Reverb's MinSize)."""
    if limiter.samples_per_insert is None:
        return Bounds(-math.inf, math.inf, 0.0, limiter.min_ready)
    middle = limiter.min_ready * limiter.samples_per_insert
    return Bounds(middle - limiter.tolerance, middle + limiter.tolerance, limiter.samples_per_insert, limiter.min_ready)


UNBOUNDED = bounds(LimiterConfig())
