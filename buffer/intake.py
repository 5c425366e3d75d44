"""Groups that have arrived: stored many at a time, and only then acknowledged."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from slipstream.buffer.arrival import Dropped, EvalAnswers, Looked
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.records import DeliveredGroup, Facts
from slipstream.buffer.sending import Send
from slipstream.buffer.store import STORED_AT_ONCE, STORED_AT_ONCE_BYTES
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import FrameError
from slipstream.configs.logs import get_log

log = get_log("buffer.intake")

Settle = Callable[[], Awaitable[None]]
"""Deals with all groups that have arrived so far, as far as Redis has room for them."""

MALFORMED_PATIENCE = 3
"""A group that arrives malformed is asked for again so many times: the network may have damaged it."""


@dataclass(frozen=True)
class Delivery:
    """A message of a rollout server whose groups are not stored yet."""

    peer: bytes
    outcomes: dict[str, str]
    """Of what was in it besides."""
    groups: list[DeliveredGroup]


class Intake:
    """Deliveries that wait for being stored together: what Redis is asked at once costs it, and us, a fraction.

    What is in here when something fails was not acknowledged, so its sender has it still.
    """

    def __init__(
        self,
        ledger: Ledger,
        send: Send,
        malformed: Callable[[str, FrameError, str], None],
        landed: Callable[[bytes], None],
    ) -> None:
        """Told of what the ledger knows already: `malformed` of every group that is none, what is wrong with it and its
        outcome; `landed` of every server whose groups are dealt with.
        """
        self._ledger = ledger
        self._send = send
        self._malformed = malformed
        self._landed = landed
        self._waiting: list[Delivery] = []
        self._groups = self._bytes = 0
        self._settling = asyncio.Lock()

    async def take(self, peer: bytes, groups: Sequence[Looked]) -> None:
        """Takes what a rollout server has delivered; it waits for `settle`, which happens by itself when it is much."""
        delivery = Delivery(peer, {}, [])
        for group in groups:
            if isinstance(group.found, DeliveredGroup):
                delivery.groups.append(group.found)
            else:
                delivery.outcomes[group.id] = await self._not_stored(group.id, group.found)
        self._waiting.append(delivery)
        self._groups += len(delivery.groups)
        self._bytes += sum(len(group.blob) for group in delivery.groups)
        if self._groups >= STORED_AT_ONCE or self._bytes >= STORED_AT_ONCE_BYTES:
            await self.settle()

    async def settle(self) -> None:
        """Stores what waits, and acknowledges it. Then all is done with that was taken before this was called."""
        async with self._settling:
            waiting, self._waiting = self._waiting, []
            self._groups = self._bytes = 0
            stored = await self._ledger.deliver([group for delivery in waiting for group in delivery.groups])
            lost = [group_id for group_id, outcome in stored.items() if outcome == m.AGAIN]
            if lost:
                log.warning("Redis lost the bytes of groups at their arrival, they are asked for again", groups=lost)
            for delivery in waiting:
                outcomes = delivery.outcomes | {group.id: stored[group.id] for group in delivery.groups}
                self._landed(delivery.peer)
                await self._send(delivery.peer, m.Acknowledge(outcomes=outcomes))

    async def _not_stored(self, group_id: str, found: EvalAnswers | Dropped | FrameError) -> str:
        """The outcome of a group that is not to be stored with the others."""
        match found:
            case EvalAnswers():
                return await self._ledger.evaluated(
                    found.work,
                    version=found.version,
                    answered=found.answered,
                    score_sum=found.score_sum,
                    blob=found.blob,
                )
            case Dropped():
                return await self._ledger.filter(group_id, reason=found.reason, facts=found.facts)
            case FrameError():
                outcome = await self._ask_again(group_id)
                self._malformed(group_id, found, outcome)
                return outcome

    async def _ask_again(self, group_id: str) -> str:
        if group_id.startswith("e"):
            return await self._ledger.evaluation_failed(group_id, patience=MALFORMED_PATIENCE)
        return await self._ledger.filter(group_id, reason="malformed", facts=Facts(), patience=MALFORMED_PATIENCE)
