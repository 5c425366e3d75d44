"""Generation by SGLang stands still while a version comes in, and never goes on with half of one."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from slipstream.buffer.wire.weights import Manifest
from slipstream.rollout_servers.engines.base import EngineError
from slipstream.rollout_servers.engines.http.begun import Begun
from slipstream.rollout_servers.engines.http.calls import Calls
from slipstream.rollout_servers.engines.http.launch import ServerProcess
from slipstream.rollout_servers.engines.sglang import requests


class Standstill:
    """Stops and goes.

    Attributes:
        version: the policy version that new tokens come from.
        begun: what the server works on.
        generating: set while generation does not stand still.
    """

    def __init__(self, server: ServerProcess, calls: Calls) -> None:
        self._server = server
        self._calls = calls
        self._since = 0.0
        self.version = 0
        self.begun: set[Begun] = set()
        self.generating = asyncio.Event()
        self.generating.set()

    async def begin(self) -> None:
        """Running requests leave the KV cache, and are computed anew afterwards. Raises: EngineError."""
        for begun in self.begun:
            begun.before_update(self.version)
        self._since = time.perf_counter()
        self.generating.clear()
        await self._calls.post(requests.PAUSE, requests.pause_request())

    async def end(self, version: int) -> float:
        """Generates on, with `version`; returns seconds that generation stood still. Raises: EngineError."""
        self.version = version
        await self._calls.post(requests.CONTINUE, {})
        self.generating.set()
        return time.perf_counter() - self._since

    @asynccontextmanager
    async def or_death(self, manifest: Manifest) -> AsyncIterator[None]:
        """What fails inside leaves the server with half a version, and it is ended. Raises: EngineError."""
        try:
            yield
        except EngineError as error:
            raise await self.half(manifest, error) from error
        except asyncio.CancelledError:
            self._calls.die(f"SGLang may be left with half of version {manifest.version}: cancelled meanwhile")
            self.generating.set()
            raise

    async def half(self, manifest: Manifest, error: EngineError) -> EngineError:
        """Ends the server, which may have half of a version. The error is the caller's."""
        return await self.die(f"SGLang may be left with half of version {manifest.version}: {error}")

    async def die(self, reason: str) -> EngineError:
        """Ends the server: it would stamp what it generates with the version before. The error is the caller's."""
        death = self._calls.die(reason)
        self.generating.set()
        await self._server.close()
        return death
