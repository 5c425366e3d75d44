"""Which tickets a rollout server has in hand, and which it has had: one that arrives twice is played once."""

import asyncio
from collections import OrderedDict
from contextlib import suppress
from typing import Final

from slipstream.configs.runtime.logging import get_log
from slipstream.rollout_servers.engines.base import Pressure

log = get_log("rollout.setbacks")

REMEMBERED = 10_000


class TicketBook:
    """Tickets from their arrival to the buffer's word on their group, and for a while after it.

    One whose id was settled is another ticket if it was granted another time: Redis has lost the first one. While that
    is still in hand, its group is taken for the other's.
    """

    def __init__(self, *, remembered: int = REMEMBERED) -> None:
        """The last `remembered` tickets that were settled are known as such."""
        self._remembered = remembered
        self._held: dict[str, str] = {}
        self._settled: OrderedDict[tuple[str, str], None] = OrderedDict()

    @property
    def held(self) -> list[str]:
        """Ids of tickets whose group is being generated or is not acknowledged, in the order of their arrival."""
        return list(self._held)

    def accept(self, ticket_id: str, grant: str) -> bool:
        """Takes a ticket in hand; False if it has come before."""
        if ticket_id in self._held or (ticket_id, grant) in self._settled:
            return False
        self._held[ticket_id] = grant
        return True

    def settle(self, ticket_id: str) -> None:
        """The buffer has the ticket's group, or the word that it came to nothing."""
        self._settled[ticket_id, self._held.pop(ticket_id)] = None
        if len(self._settled) > self._remembered:
            self._settled.popitem(last=False)


USUAL = 16
"""Failures in a row that are none of the server's business, such as prompts that are too long."""
FIRST_S = 0.1
MOST_S = 30.0


class Setbacks:
    """How long the word that a ticket has failed is held back: its credit is not free before, so fewer come.

    Not at all, up to USUAL failures in a row; then twice as long for each further one. A success ends it, also for
    those that are held back by then: whatever all tickets of a moment failed of is over.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._succeeded = asyncio.Event()

    def success(self) -> None:
        """A ticket has come to something."""
        if self._in_a_row > USUAL:
            log.info("tickets succeed again", failed_before=self._in_a_row)
            self._succeeded.set()
            self._succeeded = asyncio.Event()
        self._in_a_row = 0

    async def hold_back(self, reason: str) -> None:
        """A ticket has failed; returns when that may be said."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.failure_s(reason)):
                await self._succeeded.wait()

    def failure_s(self, reason: str) -> float:
        """A ticket has failed; for how many seconds that is held back."""
        self._in_a_row += 1
        further = self._in_a_row - USUAL
        if further <= 0:
            return 0.0
        if further == 1:
            log.warning("nothing but failures, so that few tickets are taken now", in_a_row=USUAL, last=reason)
        return min(MOST_S, FIRST_S * 2.0 ** min(further - 1, 20))


INCREASE: Final = 1
"""Groups that are added at a time."""
DECREASE: Final = 0.5
"""What is left of the limit when the engine preempted requests, or its KV cache is over KV_CACHE_HIGH."""
KV_CACHE_HIGH: Final = 0.95
"""Share of the KV cache above which the limit falls."""


class Concurrency:
    """Additive increase, multiplicative decrease; without pressure it stays at the most.

    A request that is preempted loses its KV cache and is computed again, so more groups at once can mean fewer tokens.
    Source: Chiu & Jain 1989, doi:10.1016/0169-7552(89)90019-6. As in RFC 5681, section 3.2, one congestion decreases it
    once: while more is in flight than the limit, nothing changes, because what it was decreased for still goes on.

    Attributes:
        limit: groups that may be in flight, between the least and the most.
    """

    def __init__(self, least: int, most: int) -> None:
        self._most = most
        self._least = min(least, most)
        self._preemptions = 0
        self.limit = most

    def observe(self, pressure: Pressure, *, groups: int) -> int:
        """The limit, after a look at the engine while so many groups are in flight."""
        pressed = self._preempted(pressure) or pressure.kv_cache_usage > KV_CACHE_HIGH
        if groups <= self.limit:
            wanted = int(self.limit * DECREASE) if pressed else self.limit + INCREASE
            self.limit = max(self._least, min(self._most, wanted))
        return self.limit

    def _preempted(self, pressure: Pressure) -> bool:
        """Whether requests were preempted since the last look; fewer than before are those of another engine."""
        before, self._preemptions = self._preemptions, pressure.preemptions
        return pressure.preemptions != before and pressure.preemptions > 0
