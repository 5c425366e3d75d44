"""Admission of fetches through a queued transport: few at a time. No sockets."""

import asyncio
import time
from dataclasses import dataclass, field

from slipstream.learner.weights.members import Absent, Member

SLOTS = 4
"""Fetches at a time while the rate is unknown."""
DEADLINE_SHARE = 0.5
"""Fetches at a time take at most this share of a deadline, at the measured rate."""
MEASURED_BYTES = 8 << 20
"""Smallest fetch that gives a rate: in smaller ones latency dominates."""


@dataclass(eq=False)
class _Waiter:
    member: Member
    granted: "asyncio.Future[None]" = field(default_factory=asyncio.Future)


class FetchQueue:
    """The members that fetch, and those that wait: the deadline of a fetch starts when it is admitted."""

    def __init__(self, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._size_bytes = 0
        self._waiting: list[_Waiter] = []
        self._fetching: set[Member] = set()
        self._rate: float | None = None

    def offer(self, size_bytes: int) -> None:
        """Sets the size of the version that is fetched from now on."""
        self._size_bytes = size_bytes

    @property
    def slots(self) -> int:
        """Fetches at a time."""
        if self._rate is None or not self._size_bytes:
            return SLOTS
        return max(1, int(self._rate * self._deadline_s * DEADLINE_SHARE / self._size_bytes))

    @property
    def waiting(self) -> int:
        """Members in the queue."""
        return len(self._waiting)

    def enter(self, member: Member) -> "asyncio.Future[None]":
        """Queues a member. The future is done when its fetch is admitted, or raises Absent.

        A member that has waited before, for a version that was superseded meanwhile, keeps its place.
        """
        if member.queued_at is None:
            member.queued_at = time.monotonic()
        waiter = _Waiter(member)
        self._waiting.append(waiter)
        self._waiting.sort(key=lambda each: each.member.queued_at or 0.0)
        self._grant()
        return waiter.granted

    def leave(self, member: Member) -> None:
        """Ends a member's wait or fetch."""
        self._waiting = [waiter for waiter in self._waiting if waiter.member is not member]
        self._fetching.discard(member)
        self._grant()

    def measure(self, sent_bytes: int, seconds: float) -> None:
        """Takes in what the learner sent to all members while one of them fetched."""
        if sent_bytes >= MEASURED_BYTES:
            rate = sent_bytes / seconds
            self._rate = rate if self._rate is None else (self._rate + rate) / 2

    def _grant(self) -> None:
        left: list[_Waiter] = []
        for waiter in self._waiting:
            if waiter.granted.done():  # cancelled
                continue
            if waiter.member.gone.is_set():
                waiter.granted.set_exception(Absent(f"{waiter.member.name}: {waiter.member.reason}"))
            elif len(self._fetching) < self.slots:
                self._fetching.add(waiter.member)
                waiter.granted.set_result(None)
            else:
                left.append(waiter)
        self._waiting = left
