"""Sends finished groups to the buffer and keeps each until it is acknowledged."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode
from slipstream.configs.runtime.logging import get_log

log = get_log("rollout.publisher")

RESEND_S = 2.0
"""The buffer is asked about a group that is not acknowledged by then; one that it lacks is sent again."""
GROUPS_PER_MESSAGE = 64
LEAST_UNDER_WAY_BYTES = 16 << 10
MOST_UNDER_WAY_BYTES = 8 << 20
"""As much as the service stores at once."""
QUICK_S = 1.0
"""What is acknowledged later than that was too much at a time, heartbeats wait behind it, if less comes sooner."""

Send = Callable[[Sequence[bytes]], Awaitable[None]]


@dataclass
class Unacknowledged:
    """A group, or the word that a ticket came to nothing, that the buffer has not confirmed."""

    frame: bytes
    is_group: bool
    sent_at: float = math.inf


class Publisher:
    """The outbox of a rollout server; credits bound it, because a group keeps its credit until it is acknowledged.

    Only so much is under way at a time, one group at the least, as the buffer acknowledges in about QUICK_S: whatever
    else the server says, above all that it is alive, travels behind it, and the network may be slow. As in TCP's slow
    start (RFC 5681, section 3.1) the window begins small and grows by what is acknowledged.

    What is not acknowledged in time may be lost, or still wait in the socket's queue, where copies of it would pile up.
    The answer to a hello decides: by then the buffer has dealt with all that was sent before.
    """

    def __init__(self, send: Send, *, resend_s: float) -> None:
        self._send = send
        self._resend_s = resend_s
        self._waiting: dict[str, Unacknowledged] = {}
        self._under_way: dict[str, Unacknowledged] = {}
        self._window_bytes = LEAST_UNDER_WAY_BYTES
        self._least_took_s = 0.0
        self._wake = asyncio.Event()
        self._asked_at = math.inf
        self._heard_at = _now()

    @property
    def in_doubt(self) -> bool:
        """Whether something was not acknowledged in time."""
        now = _now()
        return any(now - item.sent_at > self._resend_s for item in self._under_way.values())

    @property
    def silence_s(self) -> float:
        """How long the buffer has said nothing."""
        return _now() - self._heard_at

    def heard(self) -> None:
        """The buffer has said something, whatever it was."""
        self._heard_at = _now()

    def deliver(self, group: m.Group) -> None:
        """Takes charge of a finished group."""
        self._put(group.id, Unacknowledged(encode(group), is_group=True))

    def fail(self, failure: m.GroupFailed) -> None:
        """Takes charge of the word that a ticket came to nothing."""
        self._put(failure.id, Unacknowledged(encode(failure), is_group=False))

    def acknowledged(self, outcomes: dict[str, str]) -> list[str]:
        """The buffer is done with these, in one way or another: those that were here are forgotten and returned.

        What came there damaged, or was lost there, stays here and is sent again.
        """
        before_bytes, alone = self._bytes_under_way, len(self._under_way) == 1
        forgotten, too_late, first_sent_at = list[str](), list[str](), math.inf
        for group_id, outcome in outcomes.items():
            item = self._under_way.pop(group_id, None) or self._waiting.pop(group_id, None)
            if item is None:
                continue
            first_sent_at = min(first_sent_at, item.sent_at)
            if outcome == m.AGAIN:
                self._waiting[group_id] = item
                continue
            forgotten.append(group_id)
            if outcome == "void":
                too_late.append(group_id)
        if too_late:
            log.warning("groups came too late, their tickets were void", groups=too_late)
        took_s = _now() - first_sent_at
        if alone or before_bytes <= LEAST_UNDER_WAY_BYTES:
            self._least_took_s = max(0.0, took_s)
        self._fit_window(before_bytes, took_s=took_s)
        self._wake.set()
        return forgotten

    def asks(self) -> None:
        """A hello is about to be sent, the first one or another one that nobody has answered."""
        self._asked_at = min(self._asked_at, _now())

    def resend_lost(self) -> None:
        """The buffer has answered: what was sent before it was first asked and is not acknowledged is lost."""
        lost = {group_id: item for group_id, item in self._under_way.items() if item.sent_at <= self._asked_at}
        self._under_way = {group_id: item for group_id, item in self._under_way.items() if group_id not in lost}
        self._waiting = lost | self._waiting
        self._window_bytes = LEAST_UNDER_WAY_BYTES
        self._asked_at = math.inf
        self._wake.set()

    async def run(self) -> None:
        """Sends until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while ids := self._next():
                items = {group_id: self._waiting.pop(group_id) for group_id in ids}
                for item in items.values():
                    item.sent_at = _now()
                self._under_way |= items
                head = [encode(m.Deliver(ids=ids))] if items[ids[0]].is_group else []
                await self._send(head + [item.frame for item in items.values()])

    @property
    def _bytes_under_way(self) -> int:
        return sum(len(item.frame) for item in self._under_way.values())

    def _fit_window(self, before_bytes: int, *, took_s: float) -> None:
        """So much was under way before an acknowledgement, which took so long."""
        left_bytes = self._bytes_under_way
        grown_bytes = max(self._window_bytes, before_bytes + (before_bytes - left_bytes))
        fitting_bytes = left_bytes if took_s > self._least_took_s + QUICK_S else grown_bytes
        self._window_bytes = min(MOST_UNDER_WAY_BYTES, max(LEAST_UNDER_WAY_BYTES, fitting_bytes))

    def _put(self, group_id: str, item: Unacknowledged) -> None:
        self._waiting[group_id] = item
        self._wake.set()

    def _next(self) -> list[str]:
        """Ids of what may go out now, as one message: the word of one failure, or groups."""
        for group_id, item in self._waiting.items():
            if not item.is_group:
                return [group_id]
        ids = list[str]()
        room_bytes = self._window_bytes - self._bytes_under_way
        for group_id, item in self._waiting.items():
            room_bytes -= len(item.frame)
            is_first = not ids and not self._under_way
            if len(ids) == GROUPS_PER_MESSAGE or (room_bytes < 0 and not is_first):
                break
            ids.append(group_id)
        return ids


def _now() -> float:
    return asyncio.get_running_loop().time()
