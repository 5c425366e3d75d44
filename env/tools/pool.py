"""A bounded pool of resources that an episode holds alone, such as processes, with a health check before each use."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from slipstream.configs.runtime.errors import format_error
from slipstream.configs.runtime.logging import get_log

log = get_log("env.pool")

Resource = TypeVar("Resource")


class Pool(Generic[Resource]):
    """At most `size` resources exist at a time; they are started on demand, for the requests in their order.

    All methods run in one event loop. Processes among them need a guard (`configs.runtime.processes`) beside, by which
    they end when this process is killed.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[Resource]],
        *,
        is_healthy: Callable[[Resource], Awaitable[bool]],
        stop: Callable[[Resource], Awaitable[None]],
        size: int,
        reuse: bool,
    ) -> None:
        """A used resource is given out again if `reuse`, else stopped."""
        self._start = start
        self._is_healthy = is_healthy
        self._stop = stop
        self._reuse = reuse
        self._slots = asyncio.Semaphore(size)
        self._idle: deque[Resource] = deque()
        self._running: set[Resource] = set()
        self._closed = False
        self._stop_failures = 0

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Resource]:
        """A healthy resource. Raises: what starting one raises; RuntimeError after `close`."""
        async with self._slots:
            resource = await self._healthy()
            try:
                yield resource
            finally:
                if self._reuse and not self._closed:
                    self._idle.append(resource)
                else:
                    await self._remove(resource)

    async def close(self) -> None:
        """Stops all resources, those in use too."""
        self._closed = True
        self._idle.clear()
        await asyncio.gather(*map(self._remove, list(self._running)))

    async def _healthy(self) -> Resource:
        while self._idle:
            resource = self._idle.popleft()
            if await self._is_healthy(resource):
                return resource
            log.warning("unhealthy resource replaced", resource=str(resource))
            await self._remove(resource)
        if self._closed:
            raise RuntimeError("the pool is closed")
        resource = await self._start()
        self._running.add(resource)
        return resource

    async def _remove(self, resource: Resource) -> None:
        if resource not in self._running:
            return
        self._running.remove(resource)
        try:
            # Shielded: an episode that is cancelled must not leave a process behind.
            await asyncio.shield(self._stop(resource))
        except Exception as error:  # noqa: BLE001  (the resource's own code; the episode is over)
            self._stop_failures += 1
            failures = self._stop_failures
            log.warning("resource not stopped", resource=str(resource), error=format_error(error), failures=failures)
