"""The outbox of a rollout server."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import structlog

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import decode
from slipstream.rollout_servers.outbox import GROUPS_PER_MESSAGE, LEAST_UNDER_WAY_BYTES, QUICK_S, Publisher

NEVER_S = 1000.0
DEADLINE_S = 30.0


class Outbox:
    """A publisher that runs, and what it has sent."""

    def __init__(self, resend_s: float) -> None:
        self.sent: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self.publisher = Publisher(self._send, resend_s=resend_s)

    async def _send(self, frames: Sequence[bytes]) -> None:
        self.sent.put_nowait(list(frames))

    async def next(self) -> list[str]:
        """The ids in the next message."""
        async with asyncio.timeout(DEADLINE_S):
            first, *blobs = await self.sent.get()
        message = decode(first, m.Deliver | m.GroupFailed)
        if isinstance(message, m.GroupFailed):
            return [message.id]
        assert [decode(blob, m.Group).id for blob in blobs] == message.ids
        return list(message.ids)

    async def nothing_more(self) -> None:
        """Gives it every opportunity to send more."""
        for _ in range(10):
            await asyncio.sleep(0)
        assert self.sent.empty()


@asynccontextmanager
async def running(resend_s: float = NEVER_S) -> AsyncIterator[Outbox]:
    outbox = Outbox(resend_s)
    task = asyncio.create_task(outbox.publisher.run())
    yield outbox
    task.cancel()
    await asyncio.wait([task])


def group(name: str, *, large: bool = False) -> m.Group:
    """A large one fills what may be under way at first."""
    indices = [0] * (LEAST_UNDER_WAY_BYTES if large else 1)
    return m.Group(id=name, kind=m.TRAIN, epoch=0, indices=indices, trajectories=[])


def failure(name: str) -> m.GroupFailed:
    return m.GroupFailed(id=name, kind=m.TRAIN, reason="reward_error", detail="", tokens=3)


async def test_what_is_not_acknowledged_in_time_is_in_doubt_and_sent_again_once_the_buffer_has_answered() -> None:
    async with running(resend_s=0.5) as outbox:
        publisher = outbox.publisher
        publisher.deliver(group("a"))
        publisher.fail(failure("f"))
        assert [await outbox.next(), await outbox.next()] == [["f"], ["a"]]
        doubts = [publisher.in_doubt]
        async with asyncio.timeout(DEADLINE_S):
            while not publisher.in_doubt:
                await asyncio.sleep(0.01)
        publisher.heard()  # it says something, but nothing about these
        doubts.append(publisher.in_doubt)
        await outbox.nothing_more()
        publisher.asks()
        publisher.resend_lost()
        assert [await outbox.next(), await outbox.next()] == [["f"], ["a"]]
        doubts.append(publisher.in_doubt)
        assert doubts == [False, True, False]


async def test_what_was_sent_after_the_buffer_was_asked_is_not_sent_again_when_it_answers() -> None:
    async with running() as outbox:
        outbox.publisher.deliver(group("a"))
        assert await outbox.next() == ["a"]
        outbox.publisher.asks()
        outbox.publisher.deliver(group("b"))
        assert await outbox.next() == ["b"]
        outbox.publisher.asks()  # again: the first time nobody may have been there
        outbox.publisher.resend_lost()
        assert await outbox.next() == ["a"]
        await outbox.nothing_more()


async def test_what_is_under_way_is_not_sent_again_before_its_time() -> None:
    async with running() as outbox:
        for name in "abc":
            outbox.publisher.deliver(group(name))
            assert await outbox.next() == [name]


async def test_everything_unacknowledged_is_sent_again_to_a_buffer_that_was_restarted() -> None:
    async with running() as outbox:
        for name in "abc":
            outbox.publisher.deliver(group(name))
        assert await outbox.next() == ["a", "b", "c"]
        outbox.publisher.fail(failure("f"))
        assert await outbox.next() == ["f"]
        assert outbox.publisher.acknowledged({"b": "ready", "unheard-of": "duplicate"}) == ["b"]
        outbox.publisher.asks()
        outbox.publisher.resend_lost()
        assert [await outbox.next(), await outbox.next()] == [["f"], ["a", "c"]]


async def test_a_group_that_came_damaged_is_sent_again_at_once() -> None:
    async with running() as outbox:
        for name in "ab":
            outbox.publisher.deliver(group(name))
        assert await outbox.next() == ["a", "b"]
        assert outbox.publisher.acknowledged({"a": m.AGAIN, "b": "ready"}) == ["b"]
        assert await outbox.next() == ["a"]
        assert outbox.publisher.acknowledged({"a": "ready"}) == ["a"]


async def test_only_so_much_is_under_way_as_is_quickly_acknowledged() -> None:
    names = [f"{number:02}" for number in range(100)]
    async with running() as outbox:
        for name in names:
            outbox.publisher.deliver(group(name, large=True))
        counts, came = list[int](), list[str]()
        for _ in range(5):
            ids = await outbox.next()
            await outbox.nothing_more()
            counts.append(len(ids))
            came += ids
            outbox.publisher.acknowledged(dict.fromkeys(ids, "ready"))
        assert counts == [1, 2, 4, 8, 16]
        assert came == names[:31], "in their order"


async def test_less_is_under_way_after_it_was_acknowledged_late(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as outbox:
        for name in "abcdefghi":
            outbox.publisher.deliver(group(name, large=True))
        for expected in (["a"], ["b", "c"]):
            assert await outbox.next() == expected
            outbox.publisher.acknowledged(dict.fromkeys(expected, "ready"))
        assert await outbox.next() == ["d", "e", "f", "g"]
        monkeypatch.setattr("slipstream.rollout_servers.outbox.QUICK_S", -1.0)
        outbox.publisher.acknowledged({"d": "ready", "e": "ready"})
        await outbox.nothing_more()
        outbox.publisher.acknowledged({"f": "ready", "g": "ready"})
        assert await outbox.next() == ["h"]


async def test_a_long_way_there_and_back_is_no_reason_for_little_to_be_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("slipstream.rollout_servers.outbox._now", lambda: now)
    names = [f"{number:02}" for number in range(20)]
    async with running() as outbox:
        for name in names:
            outbox.publisher.deliver(group(name, large=True))
        counts = list[int]()
        for _ in range(4):
            ids = await outbox.next()
            counts.append(len(ids))
            now += 2 * QUICK_S
            outbox.publisher.acknowledged(dict.fromkeys(ids, "ready"))
        assert counts == [1, 2, 4, 8]


async def test_the_word_of_a_failure_waits_for_no_group() -> None:
    async with running() as outbox:
        for name in "ab":
            outbox.publisher.deliver(group(name, large=True))
        assert await outbox.next() == ["a"]
        outbox.publisher.fail(failure("f"))
        assert await outbox.next() == ["f"]


async def test_groups_that_finish_together_travel_together_up_to_the_batch_size() -> None:
    names = [str(number) for number in range(GROUPS_PER_MESSAGE + 6)]
    async with running() as outbox:
        for name in names:
            outbox.publisher.deliver(group(name))
        assert await outbox.next() == names[:GROUPS_PER_MESSAGE]
        assert await outbox.next() == names[GROUPS_PER_MESSAGE:]


@pytest.mark.parametrize("outcome", ["filtered", "evaluated", "duplicate", "void", "finished"])
async def test_a_group_that_was_filtered_or_came_too_late_is_forgotten_like_a_stored_one(outcome: str) -> None:
    async with running() as outbox:
        outbox.publisher.deliver(group("a"))
        assert await outbox.next() == ["a"]
        outbox.publisher.acknowledged({"a": outcome})
        outbox.publisher.asks()
        outbox.publisher.resend_lost()
        outbox.publisher.deliver(group("b"))
        assert await outbox.next() == ["b"]


async def test_only_what_came_too_late_while_the_run_goes_on_is_worth_a_warning() -> None:
    async with running() as outbox:
        outbox.publisher.deliver(group("a"))
        outbox.publisher.deliver(group("b"))
        with structlog.testing.capture_logs() as said:
            outbox.publisher.acknowledged({"a": "finished", "b": "void"})
    assert [line["groups"] for line in said] == [["b"]]
