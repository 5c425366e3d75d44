"""Calls beside an event loop, all from one thread and one after the other."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

Value = TypeVar("Value")


class OneThread:
    """A thread that makes calls in the order in which they were asked for.

    Unlike with an executor nobody waits for it at the end: a call that hangs must not keep a server from stopping.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        Thread(target=self._run, daemon=True).start()

    async def call(self, function: Callable[..., Value], *arguments: object) -> Value:
        """What the function returns or raises; it may raise no other than an Exception.

        A call that nobody waits for any more when its turn comes is not made.
        """
        future: Future[Value] = Future()
        self._calls.put((future, partial(function, *arguments)))
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        while True:
            future, function = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                value = function()
            except Exception as error:  # noqa: BLE001  (raised again where the future is awaited)
                future.set_exception(error)
            else:
                future.set_result(value)
