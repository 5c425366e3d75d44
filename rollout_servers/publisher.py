"""Sends finished groups to the buffer and keeps each until it is acknowledged."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode
from slipstream.configs.logs import get_log

log = get_log("rollout.publisher")

GROUPS_PER_MESSAGE = 64

Send = Callable[[Sequence[bytes]], Awaitable[None]]


@dataclass
class Unacknowledged:
    """A group, or the word that a ticket came to nothing, that the buffer has not confirmed."""

    frame: bytes
    is_group: bool
    sent_at: float | None = None


class Publisher:
    """The outbox of a rollout server; credits bound it, because a group keeps its credit until it is acknowledged.

    Nothing is sent again to a buffer that keeps silent: the copies would pile up in the socket's queue.
    """

    def __init__(self, send: Send, *, resend_s: float) -> None:
        self._send = send
        self._resend_s = resend_s
        self._outbox: dict[str, Unacknowledged] = {}
        self._wake = asyncio.Event()
        self._heard_at = _now()

    @property
    def in_doubt(self) -> bool:
        """Whether something was not acknowledged in time and nothing was heard since it was sent."""
        now = _now()
        return any(self._overdue(item, now) and not self._heard_since(item) for item in self._outbox.values())

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
        """The buffer is done with these, in one way or another: those that were here are forgotten and returned."""
        forgotten = [group_id for group_id in outcomes if self._outbox.pop(group_id, None)]
        for group_id in forgotten:
            if outcomes[group_id] == "void":
                log.warning("group came too late, its ticket had expired", group=group_id)
        return forgotten

    def resend_all(self) -> None:
        """The buffer has welcomed this server anew: whatever was under way may be lost."""
        for item in self._outbox.values():
            item.sent_at = None
        self._wake.set()

    async def run(self) -> None:
        """Sends until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._resend_s):
                    await self._wake.wait()
            except TimeoutError:
                pass  # time to look for what was not acknowledged
            self._wake.clear()
            now = _now()
            due = {
                group_id: item
                for group_id, item in self._outbox.items()
                if item.sent_at is None or (self._overdue(item, now) and self._heard_since(item))
            }
            for item in due.values():
                item.sent_at = now
            await self._send_groups({group_id: item.frame for group_id, item in due.items() if item.is_group})
            for item in due.values():
                if not item.is_group:
                    await self._send([item.frame])

    def _overdue(self, item: Unacknowledged, now: float) -> bool:
        return item.sent_at is not None and now - item.sent_at > self._resend_s

    def _heard_since(self, item: Unacknowledged) -> bool:
        return item.sent_at is not None and self._heard_at > item.sent_at

    def _put(self, group_id: str, item: Unacknowledged) -> None:
        self._outbox[group_id] = item
        self._wake.set()

    async def _send_groups(self, groups: dict[str, bytes]) -> None:
        ids = list(groups)
        for start in range(0, len(ids), GROUPS_PER_MESSAGE):
            batch = ids[start : start + GROUPS_PER_MESSAGE]
            await self._send([encode(m.Deliver(ids=batch)), *(groups[group_id] for group_id in batch)])


def _now() -> float:
    return asyncio.get_running_loop().time()
