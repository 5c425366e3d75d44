"""The outbox of a rollout server."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import structlog

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import decode, decode_group
from slipstream.rollout_servers.outbox import GROUPS_PER_MESSAGE, LEAST_WINDOW_BYTES, SLOW_ACK_S, Outbox

LARGE = random.Random(0).choices(range(1 << 30, 1 << 31), k=LEAST_WINDOW_BYTES // 3)
"""Compression hardly shortens it."""
NEVER_S = 1000.0
DEADLINE_S = 30.0


class Wire:
    """The messages that a running outbox has sent."""

    def __init__(self, resend_s: float) -> None:
        self.sent: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self.outbox = Outbox(self._send, resend_s=resend_s)

    async def _send(self, frames: Sequence[bytes]) -> None:
        self.sent.put_nowait(list(frames))

    def deliver(self, *names: str, large: bool = False) -> None:
        """Queues groups; a large one fills the initial window."""
        indices = LARGE if large else [0]
        for name in names:
            self.outbox.deliver(m.Group(id=name, kind=m.TRAIN, epoch=0, indices=indices, trajectories=[]))

    def fail(self, name: str) -> None:
        self.outbox.fail(m.GroupFailed(id=name, kind=m.TRAIN, reason="reward_error", detail="", tokens=3))

    def acknowledge(self, names: Sequence[str]) -> None:
        self.outbox.acknowledge(dict.fromkeys(names, "ready"))

    def rejoin(self) -> None:
        """The buffer replies to a hello."""
        self.outbox.record_hello()
        self.outbox.resend_lost()

    async def next(self) -> list[str]:
        """The ids in the next message."""
        async with asyncio.timeout(DEADLINE_S):
            first, *blobs = await self.sent.get()
        message = decode(first, m.Deliver | m.GroupFailed)
        if isinstance(message, m.GroupFailed):
            return [message.id]
        assert [decode_group(blob).id for blob in blobs] == message.ids
        return list(message.ids)

    async def nothing_more(self) -> None:
        """Lets the outbox run, and asserts that it sends nothing."""
        for _ in range(10):
            await asyncio.sleep(0)
        assert self.sent.empty()


@asynccontextmanager
async def running(resend_s: float = NEVER_S) -> AsyncIterator[Wire]:
    wire = Wire(resend_s)
    task = asyncio.create_task(wire.outbox.run())
    yield wire
    task.cancel()
    await asyncio.wait([task])


async def test_overdue_messages_are_sent_again_after_a_welcome() -> None:
    async with running(resend_s=0.5) as wire:
        wire.deliver("a")
        wire.fail("f")
        assert [await wire.next(), await wire.next()] == [["f"], ["a"]]
        overdue = [wire.outbox.overdue]
        async with asyncio.timeout(DEADLINE_S):
            while not wire.outbox.overdue:
                await asyncio.sleep(0.01)
        wire.outbox.record_receipt()  # a message about something else
        overdue.append(wire.outbox.overdue)
        await wire.nothing_more()
        wire.rejoin()
        assert [await wire.next(), await wire.next()] == [["f"], ["a"]]
        assert [*overdue, wire.outbox.overdue] == [False, True, False]


async def test_messages_after_the_first_hello_are_not_sent_again() -> None:
    async with running() as wire:
        wire.deliver("a")
        assert await wire.next() == ["a"]
        wire.outbox.record_hello()
        wire.deliver("b")
        assert await wire.next() == ["b"]
        wire.rejoin()  # repeats the hello: the first one may not have arrived
        assert await wire.next() == ["a"]
        await wire.nothing_more()


async def test_unacknowledged_messages_are_sent_to_restarted_buffer() -> None:
    async with running() as wire:
        wire.deliver(*"abc")
        assert await wire.next() == ["a", "b", "c"]
        wire.fail("f")
        assert await wire.next() == ["f"]
        assert wire.outbox.acknowledge({"b": "ready", "unknown": "duplicate"}) == ["b"]
        wire.rejoin()
        assert [await wire.next(), await wire.next()] == [["f"], ["a", "c"]]


async def test_a_damaged_group_is_sent_again_at_once() -> None:
    async with running() as wire:
        wire.deliver(*"ab")
        assert await wire.next() == ["a", "b"]
        assert wire.outbox.acknowledge({"a": m.AGAIN, "b": "ready"}) == ["b"]
        assert await wire.next() == ["a"]
        assert wire.outbox.acknowledge({"a": "ready"}) == ["a"]


async def test_the_window_doubles_with_each_acknowledgement() -> None:
    names = [f"{number:02}" for number in range(100)]
    async with running() as wire:
        wire.deliver(*names, large=True)
        messages = list[list[str]]()
        for _ in range(5):
            messages.append(await wire.next())
            await wire.nothing_more()
            wire.acknowledge(messages[-1])
        assert [len(ids) for ids in messages] == [1, 2, 4, 8, 16]
        assert sum(messages, []) == names[:31], "in their order"  # noqa: RUF017


async def test_a_slow_acknowledgement_shrinks_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as wire:
        wire.deliver(*"abcdefghi", large=True)
        for expected in (["a"], ["b", "c"]):
            assert await wire.next() == expected
            wire.acknowledge(expected)
        assert await wire.next() == ["d", "e", "f", "g"]
        monkeypatch.setattr("slipstream.rollout_servers.outbox.SLOW_ACK_S", -1.0)
        wire.acknowledge("de")
        await wire.nothing_more()
        wire.acknowledge("fg")
        assert await wire.next() == ["h"]


async def test_a_long_round_trip_does_not_shrink_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("slipstream.rollout_servers.outbox._now", lambda: now)
    async with running() as wire:
        wire.deliver(*(f"{number:02}" for number in range(20)), large=True)
        counts = list[int]()
        for _ in range(4):
            ids = await wire.next()
            counts.append(len(ids))
            now += 2 * SLOW_ACK_S
            wire.acknowledge(ids)
        assert counts == [1, 2, 4, 8]


async def test_failures_are_sent_before_waiting_groups() -> None:
    async with running() as wire:
        wire.deliver(*"ab", large=True)
        assert await wire.next() == ["a"]
        wire.fail("f")
        assert await wire.next() == ["f"]


async def test_groups_are_batched_up_to_the_limit() -> None:
    names = [str(number) for number in range(GROUPS_PER_MESSAGE + 6)]
    async with running() as wire:
        wire.deliver(*names)
        assert await wire.next() == names[:GROUPS_PER_MESSAGE]
        assert await wire.next() == names[GROUPS_PER_MESSAGE:]


@pytest.mark.parametrize("outcome", ["filtered", "evaluated", "duplicate", "void", "finished"])
async def test_every_final_outcome_removes_the_group(outcome: str) -> None:
    async with running() as wire:
        wire.deliver("a")
        assert await wire.next() == ["a"]
        wire.outbox.acknowledge({"a": outcome})
        wire.rejoin()
        wire.deliver("b")
        assert await wire.next() == ["b"]


async def test_only_void_groups_are_logged() -> None:
    async with running() as wire:
        wire.deliver(*"ab")
        with structlog.testing.capture_logs() as logs:
            wire.outbox.acknowledge({"a": "finished", "b": "void"})
    assert [line["groups"] for line in logs] == [["b"]]
