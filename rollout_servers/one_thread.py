"""Calls beside an event loop, from one thread and one after the other."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, TypeVar

from slipstream.configs.logs import get_log

log = get_log("rollout.one_thread")

Value = TypeVar("Value")


class OneThread:
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
