"""Learners that wait for groups: each is answered once there are enough, or once its patience is over."""

import asyncio
from dataclasses import dataclass

from slipstream.buffer.ledger import Ledger
from slipstream.buffer.records import SupersededError, UnknownLearnerError
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

    async def grant(self) -> None:
        """Answers whoever can have groups now, and whoever has waited for long enough."""
        for pending in list(self._waiting.values()):
            answer = await self._answer(pending)
            if answer is not None:
                if self._waiting.get(pending.peer) is pending:
                    del self._waiting[pending.peer]
                await self._send(pending.peer, answer)

    async def _answer(self, pending: Pending) -> m.Lease | m.NotReady | m.Refused | None:
        request, lease = pending.request, None
        try:
            lease = await self._ledger.lease(
                request.step,
                consuming_version=request.consuming_version,
                count=request.count,
                learner=request.incarnation,
            )
        except SupersededError as error:
            return m.Refused(request=request.request, reason=str(error))
        except UnknownLearnerError:
            pass  # the learner's other connection is asked who it is at what it says next
        if lease is not None:
            return m.Lease(request=request.request, group_ids=lease.ids, weights=lease.weights)
        return m.NotReady(request=request.request) if _now() >= pending.until else None


def _now() -> float:
    return asyncio.get_running_loop().time()
