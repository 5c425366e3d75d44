"""Shares of the rollout servers in the groups that admission allows, and the measured throughput that bounds them."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

DELIVERIES_PER_SERVER = 16
"""Time constant of the throughput's mean, in groups of the fleet per server."""
SLACK = 1.25
"""Excess of a server's limit over its share in the throughput. Without it, chance would decide which of two equal
servers holds more, and for long: each would finish as many groups as it may hold."""


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

    Of those that hold equally many, the first gets more. From a common level each gets ⌈room / candidates⌉ at most.
    """
    room = max((each.room for each in candidates), default=0)
    shares = [0] * len(candidates)
    heap = [(each.held, index) for index, each in enumerate(candidates)]
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
