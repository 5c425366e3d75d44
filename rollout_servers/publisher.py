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
    """The outbox of a rollout server; credits bound it, because a group keeps its credit until it is acknowledged."""

    def __init__(self, send: Send, *, resend_s: float) -> None:
        self._send = send
        self._resend_s = resend_s
        self._outbox: dict[str, Unacknowledged] = {}
        self._wake = asyncio.Event()

    def deliver(self, group: m.Group) -> None:
        """Takes charge of a finished group."""
        self._put(group.id, Unacknowledged(encode(group), is_group=True))

    def fail(self, failure: m.GroupFailed) -> None:
        """Takes charge of the word that a ticket came to nothing."""
        self._put(failure.id, Unacknowledged(encode(failure), is_group=False))

    def acknowledged(self, outcomes: dict[str, str]) -> None:
        """The buffer has these: they are forgotten here."""
        for group_id, outcome in outcomes.items():
            if self._outbox.pop(group_id, None) and outcome == "void":
                log.warning("group came too late, its ticket had expired", group=group_id)

    def resend_all(self) -> None:
        """The buffer was restarted: whatever was under way may be lost."""
        for item in self._outbox.values():
            item.sent_at = None
        self._wake.set()

    async def run(self) -> None:
        """Sends until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(self._resend_s):
                    await self._wake.wait()
            except TimeoutError:
                pass  # time to look for what was not acknowledged
            self._wake.clear()
            now = loop.time()
            due = {
                group_id: item
                for group_id, item in self._outbox.items()
                if item.sent_at is None or now - item.sent_at > self._resend_s
            }
            for item in due.values():
                item.sent_at = now
            await self._send_groups({group_id: item.frame for group_id, item in due.items() if item.is_group})
            for item in due.values():
                if not item.is_group:
                    await self._send([item.frame])

    def _put(self, group_id: str, item: Unacknowledged) -> None:
        self._outbox[group_id] = item
        self._wake.set()

    async def _send_groups(self, groups: dict[str, bytes]) -> None:
        ids = list(groups)
        for start in range(0, len(ids), GROUPS_PER_MESSAGE):
            batch = ids[start : start + GROUPS_PER_MESSAGE]
            await self._send([encode(m.Deliver(ids=batch)), *(groups[group_id] for group_id in batch)])
