"""A server stays on the version that is being evaluated."""

import asyncio

from slipstream.buffer.wire import messages as m
from slipstream.rollout_servers.weights.eval_hold import EvaluationHold
from tests.rollout_servers.weights.channel import DEADLINE_S


def ticket(name: str) -> m.Ticket:
    return m.Ticket(id=name, kind=m.EVAL, epoch=0, indices=[0], samples=1, version=3)


def holds(hold: EvaluationHold) -> bool:
    """Its state; a function, because mypy takes a property's value for constant."""
    return hold.active


async def test_an_evaluated_version_is_held_until_drained(hold: EvaluationHold) -> None:
    assert not holds(hold)
    hold.hold(3)
    hold.drained(2)  # late, and of an earlier version
    assert holds(hold)
    hold.drained(3)
    assert not holds(hold)
    async with asyncio.timeout(DEADLINE_S):
        await hold.released()


async def test_a_drained_later_version_releases_earlier_ones(hold: EvaluationHold) -> None:
    hold.hold(3)
    hold.drained(5)
    hold.drained(2)  # late, and of an earlier version
    hold.hold(4)
    assert not holds(hold)


async def test_drained_version_is_held_while_tickets_are_open(hold: EvaluationHold) -> None:
    hold.hold(3)
    hold.started(ticket("a"))
    hold.started(ticket("b"))
    hold.drained(3)
    hold.answered(ticket("a"))
    assert holds(hold)
    hold.answered(ticket("b"))
    assert not holds(hold)


async def test_a_change_is_signalled(hold: EvaluationHold) -> None:
    for change, signalled in ((hold.hold, True), (hold.hold, False), (hold.drained, True), (hold.drained, False)):
        change(3)
        assert hold.changed.is_set() == signalled
        hold.changed.clear()


async def test_an_expired_hold_affects_no_later_version() -> None:
    hold = EvaluationHold(hold_s=0.02)
    hold.hold(3)
    hold.started(ticket("a"))
    async with asyncio.timeout(DEADLINE_S):
        await hold.released()
    assert not holds(hold)
    hold.drained(3)
    hold.hold(4)
    assert holds(hold)


async def test_each_hold_has_its_own_time() -> None:
    """The timer of a hold that has ended does not end the next one."""
    hold = EvaluationHold(hold_s=0.02)
    hold.started(ticket("a"))
    hold.answered(ticket("a"))
    loop = asyncio.get_running_loop()
    first_ends = loop.create_future()
    loop.call_later(0.021, first_ends.set_result, None)
    await asyncio.sleep(0)
    hold._hold_s = DEADLINE_S
    hold.started(ticket("b"))
    await first_ends
    assert holds(hold)
