"""Blocking calls beside an event loop, in threads that don't keep the process alive."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, TypeVar

from slipstream.configs.runtime.logging import get_log

log = get_log("rollout.one_thread")


def run_in_thread(call: Callable[..., Any], *arguments: object) -> "asyncio.Future[Any]":
    """Runs a call in a thread of its own; what it returns or raises is the future's.

    Unlike the loop's own executor nobody waits for the thread at the end: one that hangs in a transfer must not keep a
    server from stopping.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run() -> None:
        value, raised = None, None
        try:
            value = call(*arguments)
        except Exception as error:  # noqa: BLE001  (raised again where the future is awaited)
            raised = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, raised)

    threading.Thread(target=run, daemon=True).start()
    return future


TEARDOWN_THREAD_NAME = "teardown"


class Teardown:
    """The threads in which things end; they must be waited for before the process does."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def release(self, held: list[Any]) -> None:
        """Empties a list that is the last to hold something."""
        self.start(held.clear)

    def start(self, end: Callable[[], None]) -> None:
        """Calls what ends something."""
        thread = threading.Thread(target=end, name=TEARDOWN_THREAD_NAME, daemon=True)
        thread.start()
        with self._lock:
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def wait(self, deadline_s: float) -> None:
        """Returns when all is gone; the deadline is for what never goes, and does no harm then.

        Python ends a thread that returns to it at the process's end. In the middle of a destructor of C++ that aborts
        the process.
        """
        until = time.monotonic() + deadline_s
        with self._lock:
            threads = self._threads
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


Value = TypeVar("Value")


class SerialThread:
    """A thread that makes calls in the order in which they were asked for.

    Unlike with an executor nobody waits for it at the end: a call that hangs must not keep a server from stopping. Nor
    does it keep others from their turn for ever: once it is given up, they are made from another thread.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._begin()

    async def call(self, function: Callable[..., Value], *arguments: object, deadline_s: float) -> Value:
        """What the function returns or raises; it may raise no other than an Exception.

        A call that nobody waits for any more when its turn comes is not made.

        Raises: TimeoutError at the deadline.
        """
        future: Future[Value] = Future()
        self._calls.put((future, partial(function, *arguments)))
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if future.running():
                log.warning("a call hangs, so further ones are made from another thread", after_s=deadline_s)
                self._begin()
            raise

    def _begin(self) -> None:
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._thread is current_thread():
            future, function = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                value = function()
            except Exception as error:  # noqa: BLE001  (raised again where the future is awaited)
                future.set_exception(error)
            else:
                future.set_result(value)


async def cancel_tasks(*tasks: "asyncio.Task[Any]") -> None:
    """Ends tasks, all of them; raises what the first of them that failed had failed with.

    Who is cancelled in here is so once they have ended: nobody would end them afterwards.
    """
    interrupted: asyncio.CancelledError | None = None
    while running := [task for task in tasks if not task.done()]:
        # More than once: Python 3.11's asyncio.wait_for, which redis-py is built on, can swallow a cancellation.
        for task in running:
            task.cancel()
        try:
            await asyncio.wait(running, timeout=0.1)
        except asyncio.CancelledError as error:
            interrupted = error
    failed = [found for task in tasks if not task.cancelled() and (found := task.exception()) is not None]
    if failed:
        raise failed[0]
    if interrupted is not None:
        raise interrupted
