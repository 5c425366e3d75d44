"""HTTP endpoints of rewards: retries with backoff, limits of concurrency and rate.

The loop of retries is written here: a retry waits its turn of the rate limit and for `Retry-After`, and `worst_case_s`,
which deadlines are derived from, must count exactly its pauses. A library of retries would take both as callbacks.
"""

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import httpx

from slipstream.configs.runtime.errors import format_error
from slipstream.rewards.base import RewardUnavailable

Value = TypeVar("Value")

_LONGEST_BACKOFF_S: Final = 30.0
_SPREAD: Final = 1.5
"""Longest pause, as a multiple of the shortest: requests that failed together are not repeated together."""
_RETRIED: Final = frozenset({408, 409, 429})  # and 5xx


class Endpoint:
    """An endpoint that answers JSON with JSON. Its clients belong to the event loop of their first use."""

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
        retries: int,
        backoff_s: float = 0.5,
        concurrency: int,
        per_minute: float | None = None,
    ) -> None:
        """A try has `timeout_s`; after the n-th failure there is a pause of at least `backoff_s` times 2^(n-1)."""
        self.url = url.rstrip("/")
        self._headers = dict(headers or {})
        self._timeout_s, self._retries, self._backoff_s = timeout_s, retries, backoff_s
        self._concurrency = concurrency
        self._interval_s = 60.0 / per_minute if per_minute else 0.0
        self._next_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def worst_case_s(self) -> float:
        """Seconds of all tries and pauses of a request, without the wait for its turn."""
        pauses_s = (min(_LONGEST_BACKOFF_S, self._backoff_s * 2.0**attempt) for attempt in range(self._retries))
        return (self._retries + 1) * self._timeout_s + _SPREAD * math.fsum(pauses_s)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The reply's JSON. Raises: as `ask` does."""
        return await self.ask(path, body, lambda reply: reply)

    async def ask(self, path: str, body: Mapping[str, Any] | None, read: Callable[[Any], Value]) -> Value:
        """Result of `read` for the reply's JSON; a ValueError of it counts as a failure.

        Args:
            body: None: a GET request.

        Raises: RewardUnavailable when the endpoint refuses the request, or all tries have failed.
        """
        async with self._slot() as client:
            for attempt in range(self._retries + 1):
                await self._wait_for_rate()
                pause_s = min(_LONGEST_BACKOFF_S, self._backoff_s * 2**attempt)
                try:
                    async with asyncio.timeout(self._timeout_s):  # httpx limits single reads
                        url = self.url + path
                        reply = await (client.get(url) if body is None else client.post(url, json=body))
                    if reply.is_success:
                        return read(reply.json())
                    why = f"HTTP {reply.status_code}: {reply.text[:200]}"
                    if reply.status_code < 500 and reply.status_code not in _RETRIED:
                        break
                    pause_s = max(pause_s, _retry_after_s(reply))
                except TimeoutError:
                    why = f"no reply within {self._timeout_s:g} s"
                except (httpx.HTTPError, ValueError) as error:  # ValueError: no JSON
                    why = format_error(error)
                if attempt < self._retries:
                    await asyncio.sleep(pause_s * random.uniform(1.0, _SPREAD))
        raise RewardUnavailable(f"{self.url}{path}: {why}")

    async def close(self) -> None:
        """Closes the connections."""
        if self._loop is not None:
            await self._client.aclose()
            self._loop = None

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[httpx.AsyncClient]:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._client = httpx.AsyncClient(headers=self._headers, timeout=self._timeout_s)
            self._slots = asyncio.Semaphore(self._concurrency)
        async with self._slots:
            yield self._client

    async def _wait_for_rate(self) -> None:
        if self._interval_s:
            now = time.monotonic()
            self._next_at = max(now, self._next_at + self._interval_s)
            await asyncio.sleep(self._next_at - now)


def _retry_after_s(reply: httpx.Response) -> float:
    try:
        return min(_LONGEST_BACKOFF_S, float(reply.headers.get("retry-after", 0)))
    except ValueError:  # a date
        return 0.0
