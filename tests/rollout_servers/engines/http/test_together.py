"""Several requests at a time."""

import asyncio

import pytest

from slipstream.rollout_servers.engines.base import EngineError
from slipstream.rollout_servers.engines.http.requests import all_or_none


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
    await asyncio.sleep(0)  # now all of them have begun
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == 3
