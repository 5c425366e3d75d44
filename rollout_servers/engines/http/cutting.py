"""Requests that a server is told to abort: late ones, and those that nobody waits for any more."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from slipstream.rollout_servers.engines.base import EngineError

Abort = Callable[[], Awaitable[None]]
_ABORT_EVERY_S = 0.1


class Collected:
    """Aborts of single requests, for a server that takes many in one call: while one is made, the next are collected.

    Requests of one moment are due together, and as many calls would hold up the event loop.
    """

    def __init__(self, abort: Callable[[Sequence[str]], Awaitable[None]]) -> None:
        """`abort` makes the call."""
        self._abort = abort
        self._due: list[str] = []
        self._calling = asyncio.Lock()

    async def __call__(self, request: str) -> None:
        """Returns when the request has been aborted, alone or with others."""
        self._due.append(request)
        async with self._calling:
            due, self._due = self._due, []
            if due:
                await self._abort(due)


@asynccontextmanager
async def cut_short(abort: Abort, *, deadline_s: float) -> AsyncIterator[None]:
    """Aborts from the deadline on what is streamed inside, so that it ends with what it has come to.

    `abort` must not fail: the stream hears of what is wrong too.
    """
    cutting = asyncio.create_task(_abort_from(deadline_s, abort))
    try:
        yield
    finally:
        cutting.cancel()


@asynccontextmanager
async def given_up(abort: Abort) -> AsyncIterator[None]:
    """Aborts what is streamed inside when that fails or is cancelled: for servers that don't notice who hangs up."""
    try:
        yield
    except (EngineError, asyncio.CancelledError):
        await abort()
        raise


async def _abort_from(deadline_s: float, abort: Abort) -> None:
    await asyncio.sleep(deadline_s)
    # Again and again: an abort that arrives before its request does nothing.
    while True:
        await abort()
        await asyncio.sleep(_ABORT_EVERY_S)
