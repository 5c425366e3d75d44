"""An event loop for user code, in a thread beside the server's: code that blocks must not delay heartbeats."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Any

from slipstream.configs.runtime.errors import format_error
from slipstream.env.base import EnvFailed
from slipstream.rollout_servers.rollouts.base import EpisodeFailed, FailureReason


@dataclass(frozen=True)
class Running:
    """A call.

    Attributes:
        result: done once the call has ended.
        cancel: cancels the call.
    """

    result: "Future[Any]"
    cancel: Callable[[], object]


class EnvLoop:
    """Runs coroutines of an env; whatever they raise is an EpisodeFailed."""

    def __init__(self, name: str, *, reason: FailureReason) -> None:
        """`name` is the thread's, `reason` that of failures."""
        self._reason = reason
        self._loop = asyncio.new_event_loop()
        Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[..., Awaitable[Any]], *arguments: object) -> "Future[Any]":
        """The future result of a call; cancelling it cancels the call."""
        return asyncio.run_coroutine_threadsafe(self._guarded(function, arguments), self._loop)

    def start(self, function: Callable[..., Awaitable[Any]], *arguments: object) -> "Running":
        """Begins a call whose end is seen when it is cancelled."""
        tasks = list[asyncio.Task[Any]]()

        async def run() -> Any:
            task = asyncio.current_task()
            assert task is not None, "a coroutine runs in a task"
            tasks.append(task)
            return await self._guarded(function, arguments)

        result = asyncio.run_coroutine_threadsafe(run(), self._loop)

        def cancel() -> None:
            # Cancelling the future itself would end it at once, and the call some time later.
            (tasks[0] if tasks else result).cancel()

        return Running(result, lambda: self._loop.call_soon_threadsafe(cancel))

    def close(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _guarded(self, function: Callable[..., Awaitable[Any]], arguments: Sequence[object]) -> Any:
        try:
            return await function(*arguments)
        # User code may raise anything; a SystemExit or a KeyboardInterrupt would end the thread's loop.
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            reason = "env_error" if isinstance(error, EnvFailed) else self._reason
            raise EpisodeFailed(reason, format_error(error)) from error

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_cancel_all(asyncio.all_tasks(self._loop)))
        self._loop.close()


async def _cancel_all(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
