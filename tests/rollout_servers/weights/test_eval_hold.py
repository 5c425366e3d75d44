"""A server stays on the version that is being evaluated."""

import pytest

from slipstream.buffer.wire import messages as m
from slipstream.rollout_servers.weights.eval_hold import EvaluationHold

AT_ONCE_S = 0.02
SOON_S = 60.0


def ticket(name: str) -> m.Ticket:
    return m.Ticket(id=name, kind=m.EVAL, epoch=0, indices=[0], samples=1, version=3)


@pytest.fixture
def hold() -> EvaluationHold:
    return EvaluationHold()


async def test_nothing_is_held_before_an_evaluation(hold: EvaluationHold) -> None:
    assert await hold.released(SOON_S)


async def test_an_evaluated_version_is_held_until_drained(
    hold: EvaluationHold,
) -> None:
    hold.hold(3)
    hold.drained(2)  # late, and of an earlier version
    assert not await hold.released(AT_ONCE_S)
    hold.hold(3)
    hold.drained(3)
    assert await hold.released(SOON_S)


async def test_a_drained_later_version_releases_earlier_ones(hold: EvaluationHold) -> None:
    hold.hold(3)
    hold.drained(3)
    hold.drained(5)
    assert await hold.released(SOON_S)
    hold.drained(2)  # late, and of an earlier version
    hold.hold(4)
    assert await hold.released(SOON_S)


async def test_drained_version_is_held_while_tickets_are_open(hold: EvaluationHold) -> None:
    hold.hold(3)
    hold.started(ticket("a"))
    hold.started(ticket("b"))
    hold.drained(3)
    hold.answered(ticket("a"))
    assert not await hold.released(AT_ONCE_S)
    hold.answered(ticket("b"))
    assert await hold.released(SOON_S)


async def test_drained_before_the_hold_counts(hold: EvaluationHold) -> None:
    hold.drained(3)
    hold.hold(3)
    assert await hold.released(SOON_S)


async def test_an_evaluation_that_was_given_up_holds_nothing(hold: EvaluationHold) -> None:
    hold.hold(3)
    hold.started(ticket("a"))
    assert not await hold.released(AT_ONCE_S)
    assert await hold.released(SOON_S)
