"""The outbox of a rollout server."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import decode
from slipstream.rollout_servers.publisher import GROUPS_PER_MESSAGE, Publisher

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
        """The ids in the next message, which the buffer answers with a word on something else."""
        async with asyncio.timeout(DEADLINE_S):
            first, *blobs = await self.sent.get()
        self.publisher.heard()
        message = decode(first, m.Deliver | m.GroupFailed)
        if isinstance(message, m.GroupFailed):
            return [message.id]
        assert [decode(blob, m.Group).id for blob in blobs] == message.ids
        return list(message.ids)


@asynccontextmanager
async def running(resend_s: float) -> AsyncIterator[Outbox]:
    outbox = Outbox(resend_s)
    task = asyncio.create_task(outbox.publisher.run())
    yield outbox
    task.cancel()
    await asyncio.wait([task])


def group(name: str) -> m.Group:
    return m.Group(id=name, kind=m.TRAIN, epoch=0, indices=[0], trajectories=[])


def failure(name: str) -> m.GroupFailed:
    return m.GroupFailed(id=name, reason="reward_error", detail="", tokens=3)


async def test_a_group_is_sent_again_and_again_until_it_is_acknowledged() -> None:
    async with running(resend_s=0.05) as outbox:
        outbox.publisher.deliver(group("a"))
        assert [await outbox.next() for _ in range(3)] == [["a"]] * 3
        outbox.publisher.acknowledged({"a": "ready"})
        outbox.publisher.deliver(group("b"))
        # One message may have been on its way when the word came.
        following = [await outbox.next() for _ in range(4)]
        assert following[1:] == [["b"]] * 3


async def test_the_word_of_a_failure_is_sent_until_it_is_acknowledged_too() -> None:
    async with running(resend_s=0.05) as outbox:
        outbox.publisher.fail(failure("a"))
        assert [await outbox.next() for _ in range(3)] == [["a"]] * 3


async def test_a_buffer_that_keeps_silent_gets_no_copies_and_is_doubted_until_it_says_something() -> None:
    async with running(resend_s=0.05) as outbox:
        publisher = outbox.publisher
        doubts = [publisher.in_doubt]
        publisher.deliver(group("a"))
        async with asyncio.timeout(DEADLINE_S):
            await outbox.sent.get()
            doubts.append(publisher.in_doubt)
            while not publisher.in_doubt:
                await asyncio.sleep(0.01)
        publisher.deliver(group("b"))
        assert await outbox.next() == ["b"], "nothing goes out before it, and what is new does"
        doubts.append(publisher.in_doubt)
        assert doubts == [False] * 3
        assert "a" in await outbox.next()


async def test_what_is_under_way_is_not_sent_again_before_its_time() -> None:
    async with running(resend_s=NEVER_S) as outbox:
        for name in "abc":
            outbox.publisher.deliver(group(name))
            assert await outbox.next() == [name]


async def test_everything_unacknowledged_is_sent_again_to_a_buffer_that_was_restarted() -> None:
    async with running(resend_s=NEVER_S) as outbox:
        for name in "abc":
            outbox.publisher.deliver(group(name))
        assert await outbox.next() == ["a", "b", "c"]
        outbox.publisher.fail(failure("f"))
        assert await outbox.next() == ["f"]
        assert outbox.publisher.acknowledged({"b": "ready", "unheard-of": "duplicate"}) == ["b"]
        outbox.publisher.resend_all()
        assert [await outbox.next(), await outbox.next()] == [["a", "c"], ["f"]]


async def test_groups_that_finish_together_travel_together_up_to_the_batch_size() -> None:
    names = [str(number) for number in range(GROUPS_PER_MESSAGE + 6)]
    async with running(resend_s=NEVER_S) as outbox:
        for name in names:
            outbox.publisher.deliver(group(name))
        assert await outbox.next() == names[:GROUPS_PER_MESSAGE]
        assert await outbox.next() == names[GROUPS_PER_MESSAGE:]


@pytest.mark.parametrize("outcome", ["filtered", "evaluated", "duplicate", "void"])
async def test_a_group_that_was_filtered_or_came_too_late_is_forgotten_like_a_stored_one(outcome: str) -> None:
    async with running(resend_s=NEVER_S) as outbox:
        outbox.publisher.deliver(group("a"))
        assert await outbox.next() == ["a"]
        outbox.publisher.acknowledged({"a": outcome})
        outbox.publisher.resend_all()
        outbox.publisher.deliver(group("b"))
        assert await outbox.next() == ["b"]
