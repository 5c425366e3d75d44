"""Groups that arrive: looked at one by one, stored many at a time, and only then acknowledged."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from slipstream.buffer.arrival import arrive, check_group
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.store import STORED_AT_ONCE, STORED_AT_ONCE_BYTES, DeliveredGroup, EvalSlice, Facts
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import FrameError, oldest_version
from slipstream.configs import RunConfig

MALFORMED_PATIENCE = 3
"""A group that arrives malformed is asked for again so many times: the network may have damaged it."""

Send = Callable[[bytes, m.Message], Awaitable[None]]


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

    def __init__(self, config: RunConfig, ledger: Ledger, send: Send, malformed: Callable[[str, FrameError], None]):
        """`malformed` is told of every group that is none."""
        self._config = config
        self._ledger = ledger
        self._send = send
        self._malformed = malformed
        self._waiting: list[Delivery] = []
        self._groups = self._bytes = 0

    async def take(self, peer: bytes, message: m.Deliver, blobs: list[bytes]) -> None:
        """Looks at what a rollout server delivers; it waits for `settle`, which happens by itself when it is much.

        Raises: FrameError when the message does not announce what came with it.
        """
        if len(blobs) != len(message.ids):
            raise FrameError(f"{len(message.ids)} groups announced, {len(blobs)} sent")
        delivery = Delivery(peer, {}, [])
        for group_id, blob in zip(message.ids, blobs, strict=True):
            outcome = await self._look_at(group_id, blob)
            if isinstance(outcome, DeliveredGroup):
                delivery.groups.append(outcome)
            else:
                delivery.outcomes[group_id] = outcome
        self._waiting.append(delivery)
        self._groups += len(delivery.groups)
        self._bytes += sum(len(group.blob) for group in delivery.groups)
        if self._groups >= STORED_AT_ONCE or self._bytes >= STORED_AT_ONCE_BYTES:
            await self.settle()

    async def settle(self) -> None:
        """Stores what waits, and acknowledges it."""
        waiting, self._waiting = self._waiting, []
        self._groups = self._bytes = 0
        stored = await self._ledger.deliver([group for delivery in waiting for group in delivery.groups])
        for delivery in waiting:
            outcomes = delivery.outcomes | {group.id: stored[group.id] for group in delivery.groups}
            # What is to come again is not acknowledged: its sender keeps it and resends.
            settled = {group_id: outcome for group_id, outcome in outcomes.items() if outcome != "again"}
            await self._send(delivery.peer, m.Acknowledge(outcomes=settled))

    async def _look_at(self, group_id: str, blob: bytes) -> DeliveredGroup | str:
        """A group that is to be stored, or the outcome of one that is not."""
        try:
            group = check_group(group_id, blob)
        except FrameError as error:
            self._malformed(group_id, error)
            return await self._ask_again(group_id)
        if group.kind == m.EVAL:
            work = EvalSlice(group.id, first=group.indices[0], tasks=len(group.indices))
            score_sum = sum(trajectory.reward for trajectory in group.trajectories)
            return await self._ledger.evaluated(
                work, version=oldest_version(group) or 0, score_sum=score_sum, blob=blob
            )
        stored, reason = arrive(group, blob, self._config)
        if reason is None:
            return stored
        return await self._ledger.filter(group_id, reason=reason, facts=stored.facts)

    async def _ask_again(self, group_id: str) -> str:
        if group_id.startswith("e"):
            return await self._ledger.evaluation_failed(group_id, patience=MALFORMED_PATIENCE)
        return await self._ledger.filter(group_id, reason="malformed", facts=Facts(), patience=MALFORMED_PATIENCE)
