"""Blocking calls beside an event loop, in threads that don't keep the process alive."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any


def in_background(call: Callable[..., Any], *arguments: object) -> "asyncio.Future[Any]":
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
