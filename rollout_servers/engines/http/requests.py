"""What the answers of all engines' servers have in common."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.rollout_servers.engines.base import Completion, EngineError, RequestRefused

PIECE_TOKENS = 8
"""An answer comes in pieces of so many tokens: what is lost of it at most when the server dies."""


class FailedAnswer(EngineError):
    """The server answered that it failed; whether it lives on, its health tells."""


class Span(msgspec.Struct):
    """Which of an answer's tokens came from which version."""

    version: str
    start: int
    end: int


class StreamError(msgspec.Struct):
    """Why a server breaks an answer off."""

    message: str
    code: int


def failure(code: int, message: str) -> EngineError:
    """The error that an HTTP status stands for: the request's fault, or the server's."""
    return RequestRefused(message) if 400 <= code < 500 else FailedAnswer(message)


def version_spans(spans: Sequence[Span]) -> list[VersionSpan]:
    """In our terms; those without tokens are left out."""
    return [
        VersionSpan(version=int(span.version), start=span.start, end=span.end)
        for span in spans
        if span.end > span.start
    ]


def whole(version: int, tokens: int) -> list[VersionSpan]:
    """The spans of tokens that all came from one version."""
    return [VersionSpan(version=version, start=0, end=tokens)] if tokens else []


@dataclass(eq=False)
class Begun:
    """A request that a server works on.

    Attributes:
        version: the engine's when it was asked.
        so_far: its answers as they have come; what has not ended is taken to be of that version.
        certain: how many tokens of each had come before the next version did; None until then.
    """

    version: int
    so_far: Callable[[], list[Completion]]
    certain: list[int] | None = None

    def before_update(self, version: int) -> None:
        """Tokens that come from now on may be of the version that follows `version`."""
        if self.certain is None and self.version == version:
            self.certain = [len(answer.token_ids) for answer in self.so_far()]

    def left(self, version: int) -> list[Completion] | None:
        """What is left of it when the server dies with `version`; None if nothing is certain."""
        if version == self.version:
            return self.so_far()
        if self.certain is None:  # it was asked during an update
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


async def all_or_none(calls: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Makes calls at the same time; the first that fails ends the others, and its error is raised."""
    # Not a TaskGroup: before Python 3.13, one that fails leaves its task marked as cancelled, and no timeout around it
    # is told from a cancellation any more. Source: docs.python.org/3/library/asyncio-task.html#task-groups.
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
