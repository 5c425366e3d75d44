"""Requests that are aborted."""

import asyncio

import pytest

from slipstream.rollout_servers.engines.base import EngineError, RequestRefused
from slipstream.rollout_servers.engines.http.cutting import cut_short, given_up

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
