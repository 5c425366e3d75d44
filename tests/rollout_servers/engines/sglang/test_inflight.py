"""Requests in flight: answers kept after a crash, aborts, concurrent calls."""

import asyncio
from dataclasses import replace

import pytest

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.rollout_servers.engines.base import Completion, EngineError, RequestRefused
from slipstream.rollout_servers.engines.sglang.engine import abort_at, abort_on_error, all_or_none
from slipstream.rollout_servers.engines.sglang.transfer import InFlight

LONG_S = 60.0


def answer(*token_ids: int, end: str = "abort", version: int = 4) -> Completion:
    spans = [VersionSpan(version=version, start=0, end=len(token_ids))]
    return Completion(token_ids, [-float(token) for token in token_ids], spans, end)


def test_all_that_has_come_is_left_while_the_version_is_the_one_that_it_began_with() -> None:
    answers = [answer(7)]
    in_flight = InFlight(4, lambda: answers)
    answers[0] = answer(7, 8)
    assert in_flight.left(4) == [answer(7, 8)]
    in_flight.before_update(4)  # which the server dies of
    assert in_flight.left(4) == [answer(7, 8)]


def test_of_an_answer_that_updates_have_overtaken_what_came_before_the_first_of_them_is_left() -> None:
    answers = [answer(7, 8), answer()]
    in_flight = InFlight(4, lambda: answers)
    in_flight.before_update(4)
    answers[:] = [answer(7, 8, 9), answer(5)]
    in_flight.before_update(5)
    answers[:] = [answer(7, 8, 9, 6), answer(5, 3)]
    assert in_flight.left(6) == [answer(7, 8), replace(answer(), spans=[])]


def test_an_answer_that_has_ended_is_left_whole_with_the_versions_that_the_server_told() -> None:
    answers = [answer(7), answer(6)]
    in_flight = InFlight(4, lambda: answers)
    in_flight.before_update(4)
    answers[0] = answer(7, 8, 9, end="stop", version=5)
    assert in_flight.left(5) == [answer(7, 8, 9, end="stop", version=5), answer(6)]


def test_nothing_is_certain_of_a_request_that_was_asked_during_an_update() -> None:
    answers = [answer(7)]
    in_flight = InFlight(4, lambda: answers)
    assert in_flight.left(5) is None
    in_flight.before_update(5)
    assert in_flight.left(6) is None


class Aborts:
    """Counts them; `enough` is set with the third."""

    def __init__(self) -> None:
        self.number = 0
        self.enough = asyncio.Event()

    async def __call__(self) -> None:
        self.number += 1
        if self.number == 3:
            self.enough.set()


async def test_what_goes_on_after_its_deadline_is_aborted_again_and_again_as_the_first_may_come_too_early() -> None:
    abort = Aborts()
    async with asyncio.timeout(LONG_S), abort_at(abort, deadline_s=0.01):
        await abort.enough.wait()


async def test_what_ends_before_its_deadline_is_never_aborted() -> None:
    abort = Aborts()
    async with abort_at(abort, deadline_s=0.01):
        pass
    async with asyncio.timeout(LONG_S):
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)
    assert abort.number == 0


@pytest.mark.parametrize("error", [EngineError("dead"), RequestRefused("no"), asyncio.CancelledError()])
async def test_what_fails_or_is_cancelled_is_aborted_once(error: BaseException) -> None:
    abort = Aborts()
    with pytest.raises(type(error)):
        async with abort_on_error(abort):
            raise error
    assert abort.number == 1


async def test_what_ends_well_is_not_aborted() -> None:
    abort = Aborts()
    async with abort_on_error(abort):
        pass
    assert abort.number == 0


async def test_the_first_that_fails_ends_the_others_and_its_error_is_raised_as_it_was() -> None:
    cancelled = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def fails() -> None:
        raise EngineError("no")

    with pytest.raises(EngineError, match="no"):
        await all_or_none([waits(), fails()])
    assert cancelled.is_set()


async def test_all_of_them_run_at_the_same_time() -> None:
    there = asyncio.Barrier(3)
    async with asyncio.timeout(30.0):
        await all_or_none(there.wait() for _ in range(3))


async def test_a_timeout_around_what_fails_is_still_told_from_a_cancellation() -> None:
    async def fails() -> None:
        raise EngineError("no")

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            with pytest.raises(EngineError):
                await all_or_none([fails()])
            await asyncio.Event().wait()


async def test_who_is_cancelled_cancels_them_all_and_waits_for_their_end() -> None:
    ended = 0

    async def waits() -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended += 1

    waiting = asyncio.create_task(all_or_none([waits(), waits(), waits()]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # now all of them have in_flight
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == 3
