"""Ends tasks, also those that don't hear it the first time."""

import asyncio
from typing import Any


async def cancel(task: "asyncio.Task[Any]") -> None:
    """Ends a task; raises what it had failed with, if it had."""
    while not task.done():
        # More than once: Python 3.11's asyncio.wait_for, which redis-py is built on, can swallow a cancellation.
        task.cancel()
        await asyncio.wait([task], timeout=0.1)
    if not task.cancelled():
        await task
