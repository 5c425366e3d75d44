"""Blocking calls in daemon threads beside an event loop, and the cancellation of tasks."""

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

log = get_log("runtime.threads")


def run_in_thread(call: Callable[..., Any], *arguments: object) -> "asyncio.Future[Any]":
    """Runs a call in a daemon thread of its own; the future has its result or exception.

    Unlike with the loop's executor, the process does not join the thread at its end: one that hangs in a transfer must
    not block a server's exit.
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
        value, failure = None, None
        try:
            value = call(*arguments)
        except Exception as error:  # noqa: BLE001  (raised again where the future is awaited)
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=run, daemon=True).start()
    return future


TEARDOWN_THREAD_NAME = "teardown"


class Teardown:
    """Threads that destroy objects whose destructors may block; to be joined before the process ends."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def release(self, held: list[Any]) -> None:
        """Clears a list that holds the last references to some objects, in a thread."""
        self.start(held.clear)

    def start(self, end: Callable[[], None]) -> None:
        """Calls `end` in a thread."""
        thread = threading.Thread(target=end, name=TEARDOWN_THREAD_NAME, daemon=True)
        thread.start()
        with self._lock:
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    def wait(self, deadline_s: float) -> None:
        """Joins the threads, for at most `deadline_s`.

        Python ends a thread that returns to it while the interpreter shuts down. In the middle of a C++ destructor that
        aborts the process.
        """
        until = time.monotonic() + deadline_s
        with self._lock:
            threads = self._threads
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


Value = TypeVar("Value")


class SerialThread:
    """A daemon thread that runs calls in the order of their submission.

    A call that hangs blocks neither the process's exit nor the others for ever: once its deadline has passed, another
    thread takes over.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._start_thread()

    async def call(self, function: Callable[..., Value], *arguments: object, deadline_s: float) -> Value:
        """Runs the function and returns its result; skips it if the caller was cancelled before its turn.

        Raises: TimeoutError at the deadline; the function's own Exception.
        """
        future: Future[Value] = Future()
        self._calls.put((future, partial(function, *arguments)))
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if future.running():
                log.warning("call hangs, another thread takes over", after_s=deadline_s)
                self._start_thread()
            raise

    def _start_thread(self) -> None:
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
    """Cancels all tasks and waits for their end. A cancellation of the caller takes effect after that.

    Raises: the exception of the first task that failed.
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
