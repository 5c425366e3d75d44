"""Few members fetch at a time through `stream`; the others wait for their turn, which costs them no deadline."""

import threading
import time
from typing import Any

import pytest

from slipstream.buffer.wire.weights import protocol as w
from slipstream.learner.weights import members as module
from slipstream.learner.weights.members import DEADLINE_SHARE, MEASURED_BYTES, SLOTS, Absent, FetchQueue, ServerRecord
from slipstream.learner.weights.members import Member as RosterMember
from tests.learner.weights.learner import Join, Learner, gathered
from tests.learner.weights.member import Member

NAMES = [f"s{number}" for number in range(10)]


@pytest.fixture
def transport() -> str:
    return "stream"


def publish(learner: Learner, members: list[Member], version: int) -> None:
    learner.deliver(version, *members)
    learner.wait()
    assert learner.publisher.metrics.evictions == 0


def test_few_members_fetch_at_a_time(learner: Learner, join: Join) -> None:
    fetching, most, lock = [0], [0], threading.Lock()

    def begin() -> None:
        with lock:
            fetching[0] += 1
            most[0] = max(most[0], fetching[0])

    def ended(answer: Any) -> Any:
        with lock:
            fetching[0] -= type(answer).__name__ == "Loaded"
        return answer

    members = [join(name, before_loading=begin, says=ended) for name in NAMES]
    gathered(learner, *NAMES)
    publish(learner, members, 1)
    assert most[0] <= module.SLOTS
    assert any(member.queued for member in members)


@pytest.mark.parametrize("deadline_s", [3.0])
def test_queued_member_outlasts_its_deadline(
    learner: Learner, join: Join, monkeypatch: pytest.MonkeyPatch, deadline_s: float
) -> None:
    monkeypatch.setattr(module, "SLOTS", 1)
    began: list[float] = []

    def dawdle() -> None:
        began.append(time.monotonic())
        threading.Event().wait(deadline_s / 2)

    names = NAMES[:4]
    members = [join(name, before_loading=dawdle) for name in names]
    gathered(learner, *names)
    publish(learner, members, 1)
    assert began[-1] - began[0] > deadline_s
    assert sorted(member.queued for member in members) == [[], [0], [1], [2]]


def waiting_member(name: str) -> RosterMember:
    join = w.Join(
        run="r", server=name, incarnation=name, version=0, staged=-1, host="", transports=["stream"], workers=1
    )  # fmt: skip
    return RosterMember(name.encode(), join, heard_at=0.0, version=0, staged=-1, record=ServerRecord())


async def test_queue_is_served_in_order_and_keeps_places() -> None:
    queue, members = FetchQueue(deadline_s=10.0), [waiting_member(f"s{number}") for number in range(SLOTS + 3)]
    granted = {each: queue.enter(each) for each in members}
    *_, superseded, late, last = members
    queue.leave(superseded)
    granted[superseded] = queue.enter(superseded)  # as after a newer version
    for done, expected in zip(members, (superseded, late, last), strict=False):
        assert queue.waiting == sum(not each.done() for each in granted.values())
        assert not granted[expected].done()
        queue.leave(done)
        assert granted[expected].done()


@pytest.mark.parametrize("fit", [0, 1, 3, 50])
async def test_slots_follow_rate_and_deadline(fit: int) -> None:
    queue = FetchQueue(deadline_s=10.0)
    queue.offer(MEASURED_BYTES)
    queue.measure(1, seconds=0.001)  # too few bytes to count
    assert queue.slots == SLOTS
    queue.measure(MEASURED_BYTES, seconds=10.0 * DEADLINE_SHARE / (fit + 0.5))
    assert queue.slots == max(1, fit)


async def test_absent_member_leaves_the_queue() -> None:
    queue, members = FetchQueue(deadline_s=10.0), [waiting_member(f"s{number}") for number in range(SLOTS + 2)]
    granted = [queue.enter(each) for each in members]
    members[SLOTS].gone.set()
    queue.leave(members[0])
    with pytest.raises(Absent):
        granted[SLOTS].result()
    assert granted[SLOTS + 1].done()
