"""Ends tasks, also those that don't hear it the first time."""

import asyncio
from typing import Any


async def cancel(*tasks: "asyncio.Task[Any]") -> None:
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
