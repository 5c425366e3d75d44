"""Several requests at a time, for servers that draw one answer per request."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


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
