"""Held tickets, delayed failures, and the outbox."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import pytest
import structlog

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import decode, decode_group
from slipstream.rollout_servers.tickets import (
    FREE_FAILURES,
    GROUPS_PER_MESSAGE,
    LEAST_WINDOW_BYTES,
    LONGEST_DELAY_S,
    SLOW_ACK_S,
    FailureBackoff,
    FirstFailures,
    Outbox,
    TicketBook,
)


def test_a_ticket_is_accepted_once_and_held_until_settled() -> None:
    book = TicketBook()
    assert [book.accept(name, "first") is not None for name in "aba"] == [True, True, False]
    assert book.held == ["a", "b"]
    book.settle("a")
    assert book.held == ["b"]
    assert not book.accept("a", "first")
    assert book.held == ["b"]


def test_a_settled_id_under_a_new_grant_is_another_ticket() -> None:
    book = TicketBook()
    book.accept("a", "first")
    assert not book.accept("a", "second"), "the group in work serves for both"
    book.settle("a")
    assert book.accept("a", "second")
    book.settle("a")
    assert [book.accept("a", grant) is not None for grant in ("first", "second", "third")] == [False, False, True]


def test_the_latest_settled_and_all_held_tickets_are_remembered() -> None:
    book = TicketBook(settled_kept=2)
    book.accept("held", "first")
    for name in "abc":
        book.accept(name, "first")
        book.settle(name)
    accepted = [book.accept(name, "first") is not None for name in ("c", "b", "a", "held")]
    assert accepted == [False, False, True, False]


@pytest.mark.parametrize(
    ("outcomes", "examined"),
    [
        (["prompt_too_long"] * 5, [3]),
        (["prompt_too_long", "image_unreadable", *["prompt_too_long"] * 3], []),
        (["", *["prompt_too_long"] * 3], []),
        (["prompt_too_long", "prompt_too_long", "", "prompt_too_long"], []),
        (["generation_timeout"] * 4, []),
        (["env_error"] * 4, []),
        (["reward_unavailable", *["prompt_empty"] * 3], []),
    ],
)
def test_same_certain_failure_of_the_first_groups_is_examined(outcomes: Sequence[str], examined: list[int]) -> None:
    first, found = FirstFailures(), []
    for number, reason in enumerate(outcomes, start=1):
        if not reason:
            first.record_success()
        elif first.record_failure(reason):
            found.append(number)
    assert found == examined


def test_delays_double_with_failures_and_a_success_ends_them() -> None:
    backoff = FailureBackoff()
    with structlog.testing.capture_logs() as logs:
        assert [backoff.record_failure("env_error") for _ in range(FREE_FAILURES)] == [0.0] * FREE_FAILURES
        assert [backoff.record_failure("env_error") for _ in range(3)] == [0.1, 0.2, 0.4]
        assert [backoff.record_failure("env_error") for _ in range(2000)][-1] == LONGEST_DELAY_S
        backoff.record_success()
        assert backoff.record_failure("env_error") == 0.0
    assert [line["log_level"] for line in logs] == ["warning", "info"]


def test_single_failures_are_not_delayed() -> None:
    backoff = FailureBackoff()
    for _ in range(FREE_FAILURES):
        assert backoff.record_failure("prompt_too_long") == 0.0
        backoff.record_success()
    assert backoff.record_failure("prompt_too_long") == 0.0


# --- the outbox of a rollout server -----------------------------------------------------------------------------------


_TOKENS = LEAST_WINDOW_BYTES // 3
LARGE = m.Trajectory(
    token_ids=random.Random(0).randbytes(4 * _TOKENS),
    action_mask=bytes(_TOKENS),
    behaviour_logprobs=bytes(4 * _TOKENS),
    spans=[],
    reward=0.0,
    scores={},
    finish_reason="stop",
)
"""Compression hardly shortens it."""
NEVER_S = 1000.0
DEADLINE_S = 30.0


class Wire:
    """The messages that a running outbox has sent."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self.outbox = Outbox(self._send, resend_s=NEVER_S)

    async def _send(self, frames: Sequence[bytes]) -> None:
        self.sent.put_nowait(list(frames))

    def deliver(self, *names: str, large: bool = False) -> None:
        """Queues groups; a large one fills the initial window."""
        trajectories = [LARGE] if large else []
        for name in names:
            group = m.Group(id=name, kind=m.TRAIN, epoch=0, indices=[0], trajectories=trajectories)
            self.outbox.deliver(group, {"digits": {name: 7}})

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
        message = decode(first, m.Deliver | m.GroupFailed | m.KeepEvent)
        if isinstance(message, m.GroupFailed | m.KeepEvent):
            return [message.id if isinstance(message, m.GroupFailed) else message.name]
        assert [decode_group(blob).id for blob in blobs] == message.ids
        return list(message.ids)

    async def nothing_more(self) -> None:
        """Lets the outbox run, and asserts that it sends nothing."""
        for _ in range(10):
            await asyncio.sleep(0)
        assert self.sent.empty()


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    wire = Wire()
    task = asyncio.create_task(wire.outbox.run())
    yield wire
    task.cancel()
    await asyncio.wait([task])


async def test_overdue_messages_are_sent_again_after_a_welcome(wire: Wire) -> None:
    wire.outbox._resend_s = 0.5
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


async def test_messages_after_the_first_hello_are_not_sent_again(wire: Wire) -> None:
    wire.deliver("a")
    assert await wire.next() == ["a"]
    wire.outbox.record_hello()
    wire.deliver("b")
    assert await wire.next() == ["b"]
    wire.rejoin()  # repeats the hello: the first one may not have arrived
    assert await wire.next() == ["a"]
    await wire.nothing_more()


async def test_unacknowledged_messages_are_sent_to_restarted_buffer(wire: Wire) -> None:
    wire.deliver(*"abc")
    assert await wire.next() == ["a", "b", "c"]
    wire.fail("f")
    assert await wire.next() == ["f"]
    assert wire.outbox.acknowledge({"b": "ready", "unknown": "duplicate"}) == ["b"]
    wire.rejoin()
    assert [await wire.next(), await wire.next()] == [["f"], ["a", "c"]]


async def test_a_damaged_group_is_sent_again_at_once(wire: Wire) -> None:
    wire.deliver(*"ab")
    assert await wire.next() == ["a", "b"]
    assert wire.outbox.acknowledge({"a": m.AGAIN, "b": "ready"}) == ["b"]
    assert await wire.next() == ["a"]
    assert wire.outbox.acknowledge({"a": "ready"}) == ["a"]


@pytest.mark.parametrize("round_trip_s", [0.0, 2 * SLOW_ACK_S])
async def test_the_window_doubles_with_each_acknowledgement(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, round_trip_s: float
) -> None:
    now = 0.0
    monkeypatch.setattr("slipstream.rollout_servers.tickets._now", lambda: now)
    names = [f"{number:02}" for number in range(40)]
    wire.deliver(*names, large=True)
    for first, end in ((0, 1), (1, 3), (3, 7), (7, 15), (15, 31)):
        assert await wire.next() == names[first:end]
        await wire.nothing_more()
        now += round_trip_s
        wire.acknowledge(names[first:end])


async def test_a_slow_acknowledgement_shrinks_the_window(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    wire.deliver(*"abcdefghi", large=True)
    for expected in (["a"], ["b", "c"]):
        assert await wire.next() == expected
        wire.acknowledge(expected)
    assert await wire.next() == ["d", "e", "f", "g"]
    monkeypatch.setattr("slipstream.rollout_servers.tickets.SLOW_ACK_S", -1.0)
    wire.acknowledge("de")
    await wire.nothing_more()
    wire.acknowledge("fg")
    assert await wire.next() == ["h"]


async def test_failures_are_sent_before_waiting_groups(wire: Wire) -> None:
    wire.deliver(*"ab", large=True)
    assert await wire.next() == ["a"]
    wire.fail("f")
    assert await wire.next() == ["f"]


async def test_groups_are_batched_up_to_the_limit(wire: Wire) -> None:
    names = [str(number) for number in range(GROUPS_PER_MESSAGE + 6)]
    wire.deliver(*names)
    assert await wire.next() == names[:GROUPS_PER_MESSAGE]
    assert await wire.next() == names[GROUPS_PER_MESSAGE:]


@pytest.mark.parametrize("outcome", ["filtered", "evaluated", "duplicate", "void", "finished"])
async def test_every_final_outcome_removes_the_group(wire: Wire, outcome: str) -> None:
    wire.deliver("a")
    assert await wire.next() == ["a"]
    with structlog.testing.capture_logs() as logs:
        wire.outbox.acknowledge({"a": outcome})
    assert [line["groups"] for line in logs] == [["a"]] * (outcome == "void")
    wire.rejoin()
    wire.deliver("b")
    assert await wire.next() == ["b"]


async def test_events_are_sent_until_they_are_kept(wire: Wire) -> None:
    event = m.EpisodeEvent(episode=1, place=2, tokens=3, content=b"turn")
    kept = wire.outbox.keep(m.KeepEvent(id="a", env="digits", event=event))
    wire.deliver("a")
    assert [await wire.next(), await wire.next()] == [["a/1/2"], ["a"]]
    wire.rejoin()
    assert [await wire.next(), await wire.next()] == [["a/1/2"], ["a"]]
    assert not kept.done()
    assert wire.outbox.acknowledge({"a/1/2": "kept"}) == []
    assert await kept == "kept"
    assert wire.outbox.acknowledge({"a/1/2": "kept", "a": "ready"}) == ["a"]


async def test_events_in_flight_delay_no_group(wire: Wire) -> None:
    def keep(place: int, content: bytes = b"turn") -> None:
        event = m.EpisodeEvent(episode=0, place=place, tokens=3, content=content)
        wire.outbox.keep(m.KeepEvent(id="a", env="digits", event=event))

    keep(0)
    wire.deliver("large", large=True)
    assert [await wire.next(), await wire.next()] == [["a/0/0"], ["large"]]
    large = bytes(m.MOST_EVENT_BYTES)
    for place in range(1, 6):
        keep(place, large)
    keep(6)
    wire.fail("f")
    assert [await wire.next() for _ in range(4)] == [[f"a/0/{place}"] for place in range(1, 4)] + [["f"]]
    await wire.nothing_more()
    wire.acknowledge(["a/0/1"])
    assert await wire.next() == ["a/0/4"]
