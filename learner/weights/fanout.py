"""Admission of fetches through `stream`: the order of the queue, and the source of each fetch.

A member whose fetch is admitted gets its deadline only then. Members that hold the version relay it, so that the
learner sends it to few, and the time grows with the logarithm of the fleet. No sockets.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from slipstream.configs.runtime.logging import get_log
from slipstream.learner.weights.members import Absent, Member

log = get_log("learner.weights")

FANOUT = 4
"""Fetches from the learner at a time while members can relay, or while the rate is unknown."""
RELAY_FANOUT = 2
"""Fetches from one relaying member at a time."""
DEADLINE_SHARE = 0.5
"""Fetches from the learner at a time take at most this share of a deadline, at the measured rate."""
MEASURED_BYTES = 8 << 20
"""Smallest fetch that gives a rate: in smaller ones latency dominates."""
AVOIDED_S = 600.0
"""After a failed fetch from a relay: time in which it does not relay, and its client fetches from the learner."""


@dataclass(eq=False)
class _Waiter:
    member: Member
    granted: "asyncio.Future[Member | None]" = field(default_factory=asyncio.Future)


class Fanout:
    """The queue of members that fetch, and the load of each source."""

    def __init__(self, roster: Iterable[Member], *, deadline_s: float) -> None:
        self._roster = roster
        self._deadline_s = deadline_s
        self._version = -1
        self._size_bytes = 0
        self._waiting: list[_Waiter] = []
        self._inflight: dict[Member, Member | None] = {}
        self._rate: float | None = None

    def offer(self, version: int, size_bytes: int) -> None:
        """Makes a version the one that is fetched from now on."""
        self._version, self._size_bytes = version, size_bytes

    @property
    def learner_slots(self) -> int:
        """Fetches from the learner at a time."""
        fit = FANOUT
        if self._rate is not None and self._size_bytes:
            fit = int(self._rate * self._deadline_s * DEADLINE_SHARE / self._size_bytes)
        now = time.monotonic()
        if any(_relays(member, now) for member in self._roster):
            fit = min(fit, FANOUT)
        return max(1, fit)

    @property
    def waiting(self) -> int:
        """Members in the queue."""
        return len(self._waiting)

    def enter(self, member: Member) -> "asyncio.Future[Member | None]":
        """Queues a member. The future gives the relay that it fetches from, None for the learner, or raises Absent.

        A member that has waited before, for a version that was superseded meanwhile, keeps its place.
        """
        if member.queued_at is None:
            member.queued_at = time.monotonic()
        waiter, full = _Waiter(member), bool(self._waiting)
        self._waiting.append(waiter)
        self._waiting.sort(key=lambda each: each.member.queued_at or 0.0)
        if not full or member.record.uses_relays_after:  # others wait for the same sources
            self._grant()
        return waiter.granted

    def leave(self, member: Member) -> None:
        """Ends a member's wait or fetch."""
        self._waiting = [waiter for waiter in self._waiting if waiter.member is not member]
        self._inflight.pop(member, None)
        self._grant()

    def measure(self, sent_bytes: int, seconds: float) -> None:
        """Takes in what the learner sent to all members while one of them fetched."""
        if sent_bytes >= MEASURED_BYTES:
            rate = sent_bytes / seconds
            self._rate = rate if self._rate is None else (self._rate + rate) / 2

    def relay_failed(self, relay: Member, client: Member, reason: str) -> None:
        """A fetch from a relay failed: either of them may be the cause, so for a while both go without."""
        until = time.monotonic() + AVOIDED_S
        relay.record.relays_after = client.record.uses_relays_after = until
        log.warning("a version was not relayed", relay=relay.name, server=client.name, reason=reason)

    def _grant(self) -> None:
        load, now = Counter(self._inflight.values()), time.monotonic()
        relays = [each for each in self._roster if each.staged == self._version and _relays(each, now)]
        room = RELAY_FANOUT * len(relays) - sum(load[relay] for relay in relays)
        slots = self.learner_slots
        left: list[_Waiter] = []
        for waiter in self._waiting:
            member = waiter.member
            if waiter.granted.done():  # cancelled
                continue
            if member.gone.is_set():
                waiter.granted.set_exception(Absent(f"{member.name}: {member.reason}"))
                continue
            relayed = bool(relays) and now >= member.record.uses_relays_after
            free = room > 0 if relayed else load[None] < slots
            if not free or load[member]:  # a relay's memory is not overwritten while others read it
                left.append(waiter)
                continue
            source = min(relays, key=lambda each: load[each]) if relayed else None
            room -= relayed
            load[source] += 1
            self._inflight[member] = source
            waiter.granted.set_result(source)
        self._waiting = left


def _relays(member: Member, now: float) -> bool:
    return member.join.relay is not None and now >= member.record.relays_after
