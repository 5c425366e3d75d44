"""Limits on the groups that are issued: the rate limiter, the uses that admission reserves, the shares of the servers.

The rate limiter is Reverb's SampleToInsertRatio, which bounds the ratio of uses to insertions:

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

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.configs.schema.buffer import BufferConfig, LimiterConfig

DELIVERIES_PER_SERVER = 16
"""Time constant of the throughput's mean, in groups of the fleet per server."""
SLACK = 1.25
"""Excess of a server's limit over its share in the throughput. Without it, chance would decide which of two equal
servers holds more, and for long: each would finish as many groups as it may hold."""


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


def uses_per_group(buffer: BufferConfig, *, publish_every_steps: int) -> float:
    """Uses that admission reserves for a group: at most one per step until it is too stale, and the rate limit's."""
    uses = min(buffer.limiter.max_uses, (buffer.max_staleness + 1) * publish_every_steps)
    return max(1.0, min(uses, buffer.limiter.samples_per_insert or math.inf))


@dataclass(frozen=True)
class Candidate:
    """A server with free credits."""

    held: int
    limit: int
    """Tickets that it may hold."""
    room: int
    """Groups that admission allows for its version, less than for others if it is behind."""


def share_room(candidates: Sequence[Candidate]) -> list[int]:
    """Further tickets of each candidate, by water-filling: each goes to the one that holds the fewest.

    Of those that hold equally many, the first gets more: at most ⌈room / candidates⌉ if all hold equally many.
    """
    room = max((candidate.room for candidate in candidates), default=0)
    shares = [0] * len(candidates)
    heap = [(candidate.held, index) for index, candidate in enumerate(candidates)]
    heapq.heapify(heap)
    granted = 0
    while heap and granted < room:
        held, index = heapq.heappop(heap)
        if held < candidates[index].limit and granted < candidates[index].room:
            shares[index] += 1
            granted += 1
            heapq.heappush(heap, (held + 1, index))
    return shares


def ticket_limit(*, throughput: float, total_throughput: float, capacity: float) -> int:
    """Tickets that a server of this throughput may hold.

    The learner consumes the `capacity` of the pipeline, in groups, in the time capacity / total_throughput; what takes
    longer is too stale. By Little's law a server that holds h tickets takes h / throughput for a group. So the limit of
    a server that is faster than that time grows with every group, and that of a slower one shrinks, down to 1.
    """
    return max(1, round(SLACK * capacity * throughput / total_throughput))


class Throughput:
    """A server's groups, exponentially weighted: a group counts less with every group of the fleet since."""

    def __init__(self, delivered_by_fleet: int) -> None:
        """A new server has the mean throughput."""
        self._groups = float(DELIVERIES_PER_SERVER)
        self._at = delivered_by_fleet

    def add(self, groups: int, *, delivered_by_fleet: int, servers: int) -> None:
        """Counts delivered groups."""
        self._groups = self.value(delivered_by_fleet=delivered_by_fleet, servers=servers) + groups
        self._at = delivered_by_fleet

    def value(self, *, delivered_by_fleet: int, servers: int) -> float:
        """The weighted number of groups; of servers with equal throughput, DELIVERIES_PER_SERVER."""
        return self._groups * math.exp((self._at - delivered_by_fleet) / (DELIVERIES_PER_SERVER * servers))
