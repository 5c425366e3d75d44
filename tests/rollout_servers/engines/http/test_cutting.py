"""Requests that are aborted."""

import asyncio
from collections.abc import Sequence

import pytest

from slipstream.rollout_servers.engines.base import EngineError, RequestRefused
from slipstream.rollout_servers.engines.http.requests import Collected, cut_short, given_up

LONG_S = 60.0


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
    async with asyncio.timeout(LONG_S), cut_short(abort, deadline_s=0.01):
        await abort.enough.wait()


async def test_what_ends_before_its_deadline_is_never_aborted() -> None:
    abort = Aborts()
    async with cut_short(abort, deadline_s=0.01):
        pass
    async with asyncio.timeout(LONG_S):
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)
    assert abort.number == 0


@pytest.mark.parametrize("error", [EngineError("dead"), RequestRefused("no"), asyncio.CancelledError()])
async def test_what_fails_or_is_cancelled_is_aborted_once(error: BaseException) -> None:
    abort = Aborts()
    with pytest.raises(type(error)):
        async with given_up(abort):
            raise error
    assert abort.number == 1


async def test_what_ends_well_is_not_aborted() -> None:
    abort = Aborts()
    async with given_up(abort):
        pass
    assert abort.number == 0


async def test_what_is_due_while_a_call_is_made_goes_into_the_next_one_together() -> None:
    calls: list[Sequence[str]] = []

    async def abort(requests: Sequence[str]) -> None:
        calls.append(requests)
        await asyncio.sleep(0)

    collected = Collected(abort)
    await asyncio.gather(*(collected(str(number)) for number in range(100)))
    await collected("later")
    assert calls == [["0"], [str(number) for number in range(1, 100)], ["later"]]


async def test_who_gives_up_in_the_middle_of_a_call_does_not_hold_up_the_others() -> None:
    begun, calls = asyncio.Event(), 0

    async def abort(requests: Sequence[str]) -> None:
        nonlocal calls
        calls += 1
        begun.set()
        if calls == 1:
            await asyncio.Event().wait()

    collected = Collected(abort)
    first, second = asyncio.ensure_future(collected("1")), asyncio.ensure_future(collected("2"))
    async with asyncio.timeout(LONG_S):
        await begun.wait()
        first.cancel()
        await second
    assert calls == 2
