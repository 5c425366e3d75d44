"""Learners that wait for groups: each is answered once there are enough, or once its patience is over."""

import asyncio
from dataclasses import dataclass

from slipstream.buffer.ledger import Ledger
from slipstream.buffer.sending import Send
from slipstream.buffer.wire import messages as m

MOST_WAITING = 100
"""Learners that may wait for a lease at once; there is one, and whoever invents more must not fill the memory."""


@dataclass(frozen=True)
class Pending:
    """A request that waits for groups."""

    peer: bytes
    request: m.LeaseRequest
    until: float


class Leasing:
    """The requests for groups that are not answered yet: the last one of each peer."""

    def __init__(self, ledger: Ledger, send: Send) -> None:
        self._ledger = ledger
        self._send = send
        self._waiting: dict[bytes, Pending] = {}
        # A learner must not be leased anything while its successor takes back what it had.
        self.alone = asyncio.Lock()

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiting)

    @property
    def until(self) -> float | None:
        """When the first one's patience is over, by the event loop's clock; None if nobody waits."""
        return min((pending.until for pending in self._waiting.values()), default=None)

    def ask(self, peer: bytes, request: m.LeaseRequest) -> None:
        """A learner wants groups. That it asks again, having heard nothing, is no reason to wait for longer."""
        if peer in self._waiting and self._waiting[peer].request.request == request.request:
            return
        self._waiting.pop(peer, None)
        while len(self._waiting) >= MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]
        self._waiting[peer] = Pending(peer, request, _now() + request.wait_s)

    def clear(self) -> None:
        """Nobody waits any more."""
        self._waiting.clear()

    async def grant(self) -> None:
        """Answers whoever can have groups now, and whoever has waited for long enough."""
        async with self.alone:
            for pending in list(self._waiting.values()):
                answer = await self._answer(pending)
                if answer is not None:
                    if self._waiting.get(pending.peer) is pending:
                        del self._waiting[pending.peer]
                    await self._send(pending.peer, answer)

    async def _answer(self, pending: Pending) -> m.Lease | m.NotReady | None:
        request = pending.request
        lease = await self._ledger.lease(request.step, consuming_version=request.consuming_version, count=request.count)
        if lease is not None:
            return m.Lease(request=request.request, step=request.step, group_ids=lease.ids, weights=lease.weights)
        return m.NotReady(request=request.request) if _now() >= pending.until else None


def _now() -> float:
    return asyncio.get_running_loop().time()
