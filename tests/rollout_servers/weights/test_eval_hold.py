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


async def test_a_version_to_be_evaluated_is_held_until_the_buffer_has_no_more_tickets_of_it(
    hold: EvaluationHold,
) -> None:
    hold.hold(3)
    hold.drained(2)  # a late word on an earlier one
    assert not await hold.released(AT_ONCE_S)
    hold.hold(3)
    hold.drained(3)
    assert await hold.released(SOON_S)


async def test_whoever_has_heard_of_a_later_version_is_not_held_for_one_before(hold: EvaluationHold) -> None:
    hold.hold(3)
    hold.drained(3)
    hold.drained(5)
    assert await hold.released(SOON_S)
    hold.drained(2)  # a late word on an earlier one
    hold.hold(4)
    assert await hold.released(SOON_S)


async def test_a_drained_version_is_held_while_its_tickets_are_worked_on(hold: EvaluationHold) -> None:
    hold.hold(3)
    hold.started(ticket("a"))
    hold.started(ticket("b"))
    hold.drained(3)
    hold.answered(ticket("a"))
    assert not await hold.released(AT_ONCE_S)
    hold.answered(ticket("b"))
    assert await hold.released(SOON_S)


async def test_drained_before_the_hold_counts_too(hold: EvaluationHold) -> None:
    hold.drained(3)
    hold.hold(3)
    assert await hold.released(SOON_S)


async def test_an_evaluation_that_was_given_up_holds_nothing_any_more(hold: EvaluationHold) -> None:
    hold.hold(3)
    hold.started(ticket("a"))
    assert not await hold.released(AT_ONCE_S)
    assert await hold.released(SOON_S)
