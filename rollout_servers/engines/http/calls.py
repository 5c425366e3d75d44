"""Calls of an engine's server, judged: one that fails means either that the server refuses it, or that it is dead."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from slipstream.rollout_servers.engines.base import EngineError, RequestRefused
from slipstream.rollout_servers.engines.http.answers import FailedAnswer
from slipstream.rollout_servers.engines.http.launch import ServerProcess

CALL_DEADLINE_S = 60.0
"""How long a call may take at least."""
_DEATH_S = 5.0
"""How long after its connections a server's process may end."""


class Calls:
    """What a server is asked until it is found dead, by one call or by its owner; then all who wait hear of it.

    Attributes:
        deadline_s: how long a call may take; then the server counts as dead.
    """

    def __init__(self, server: ServerProcess, *, update_deadline_s: float) -> None:
        """A call may take as long as an update: it may be a part of one, or have to wait for its end."""
        self.deadline_s = max(CALL_DEADLINE_S, update_deadline_s)
        self._server = server
        self._waiting: set[asyncio.Timeout] = set()
        self._death: str | None = None

    async def get(self, path: str) -> bytes:
        """The answer to a GET. Raises: RequestRefused, EngineError."""
        async with self.judged():
            return await self._server.client.get(path, deadline_s=self.deadline_s)

    async def post(self, path: str, body: Any = None) -> bytes:
        """The answer to a POST of `body` as JSON. Raises: RequestRefused, EngineError."""
        async with self.judged():
            return await self._server.client.post(path, body, deadline_s=self.deadline_s)

    @asynccontextmanager
    async def judged(self) -> AsyncIterator[None]:
        """Judges calls of the client that are made inside; ends them when the server is found dead elsewhere.

        Raises: RequestRefused when a healthy server refuses or fails this one request, EngineError when it is dead.
        """
        try:
            async with self.until_death():
                yield
        except RequestRefused:
            raise
        except EngineError as error:
            raise await self._verdict(error) from error

    @asynccontextmanager
    async def until_death(self) -> AsyncIterator[None]:
        """Ends what is awaited inside when the server is found dead elsewhere. Raises: EngineError."""
        self.check_alive()
        try:
            async with asyncio.timeout(None) as waiting:
                self._waiting.add(waiting)
                yield
        except TimeoutError:
            assert waiting.expired(), "nothing inside lets a deadline of its own pass as that"
            raise EngineError(str(self._death)) from None
        finally:
            self._waiting.discard(waiting)

    def check_alive(self) -> None:
        """Raises: EngineError when the server is dead."""
        death = self._death or self._server.obituary()
        if death is not None:
            raise self.die(death)

    def die(self, reason: str) -> EngineError:
        """Declares the server dead, and tells all who wait; the first reason counts. The error is the caller's."""
        self._death = self._death or reason
        told, self._waiting = self._waiting, set()
        for waiting in told:
            waiting.reschedule(asyncio.get_running_loop().time())
        return EngineError(self._death)

    async def _verdict(self, error: EngineError) -> EngineError:
        if self._death is None:
            if isinstance(error, FailedAnswer):
                if await self._server.healthy():
                    return RequestRefused(str(error))
            else:
                await asyncio.wait({self._server.ended}, timeout=_DEATH_S)
        return self.die(self._server.obituary() or str(error))
