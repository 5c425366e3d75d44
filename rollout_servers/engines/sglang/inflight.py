"""Requests in flight: what is kept of them when the server crashes, and how they are aborted."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.rollout_servers.engines.base import Completion, EngineError


def whole(version: int, tokens: int) -> list[VersionSpan]:
    """Spans of tokens that all come from one version."""
    return [VersionSpan(version=version, start=0, end=tokens)] if tokens else []


@dataclass(eq=False)
class InFlight:
    """A request that the server processes.

    Attributes:
        version: the engine's version when the request was sent.
        so_far: its answers as received; tokens of an unfinished answer count as that version's.
        certain: number of tokens of each answer before the next update began; None until then.
    """

    version: int
    so_far: Callable[[], list[Completion]]
    certain: list[int] | None = None

    def before_update(self, version: int) -> None:
        """Records the tokens that surely come from `version`: later ones may come from the next."""
        if self.certain is None and self.version == version:
            self.certain = [len(answer.token_ids) for answer in self.so_far()]

    def left(self, version: int) -> list[Completion] | None:
        """Answers that survive a crash of the server at `version`; None if the version of no token is known."""
        if version == self.version:
            return self.so_far()
        if self.certain is None:  # it was sent during an update
            return None
        return [
            self._first(answer, tokens) if answer.finish_reason == "abort" else answer
            for answer, tokens in zip(self.so_far(), self.certain, strict=True)
        ]

    def _first(self, answer: Completion, tokens: int) -> Completion:
        return Completion(
            token_ids=answer.token_ids[:tokens],
            logprobs=answer.logprobs[:tokens],
            spans=whole(self.version, tokens),
            finish_reason=answer.finish_reason,
        )


Abort = Callable[[], Awaitable[None]]
_ABORT_EVERY_S = 0.1


@asynccontextmanager
async def abort_at(abort: Abort, *, deadline_s: float) -> AsyncIterator[None]:
    """Aborts the streams inside from the deadline on; they end with the tokens that they have.

    `abort` must not fail: the stream reports the error too.
    """
    aborting = asyncio.create_task(_abort_from(deadline_s, abort))
    try:
        yield
    finally:
        aborting.cancel()


@asynccontextmanager
async def abort_on_error(abort: Abort) -> AsyncIterator[None]:
    """Aborts the streams inside when one fails or is cancelled: SGLang does not notice a closed connection."""
    try:
        yield
    except (EngineError, asyncio.CancelledError):
        await abort()
        raise


async def _abort_from(deadline_s: float, abort: Abort) -> None:
    await asyncio.sleep(deadline_s)
    # Repeated: an abort that arrives before its request has no effect.
    while True:
        await abort()
        await asyncio.sleep(_ABORT_EVERY_S)


async def all_or_none(calls: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Awaits calls concurrently; the first failure cancels the others and is raised."""
    # Not a TaskGroup: before Python 3.13, a failure leaves its task marked as cancelled, and a timeout around it can't
    # be told from a cancellation. Source: docs.python.org/3/library/asyncio-task.html#task-groups.
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
