"""Tasks are ended, whatever they and others do meanwhile."""

import asyncio

import pytest

from slipstream.configs.runtime.threads import cancel_tasks
from tests.buffer.peers import PATIENCE_S


async def deaf(times: int) -> None:
    """Takes that many cancellations for something else."""
    for _ in range(times):
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            continue
    await asyncio.sleep(PATIENCE_S)


async def broken() -> None:
    raise ValueError("broken")


async def begun(*tasks: "asyncio.Task[None]") -> None:
    """Lets them come to their first wait."""
    await asyncio.wait(tasks, timeout=0)


async def test_a_task_that_swallows_its_cancellation_ends_all_the_same() -> None:
    tasks = asyncio.create_task(deaf(3)), asyncio.create_task(deaf(0))
    await begun(*tasks)
    async with asyncio.timeout(PATIENCE_S):
        await cancel_tasks(*tasks)
    assert all(task.cancelled() for task in tasks)


async def test_what_a_task_failed_with_is_raised_once_all_have_ended() -> None:
    tasks = asyncio.create_task(broken()), asyncio.create_task(deaf(1))
    await begun(*tasks)
    with pytest.raises(ValueError, match="broken"):
        await cancel_tasks(*tasks)
    assert all(task.done() for task in tasks)


async def test_who_is_cancelled_while_it_ends_others_still_ends_them() -> None:
    others = asyncio.create_task(deaf(3)), asyncio.create_task(deaf(3))
    ending = asyncio.create_task(cancel_tasks(*others))
    await begun(*others, ending)
    async with asyncio.timeout(PATIENCE_S):
        while not ending.done():
            ending.cancel()
            await asyncio.wait([ending], timeout=0.01)
    assert ending.cancelled()
    assert all(task.cancelled() for task in others)
