"""Threads beside an event loop, and the cancellation of tasks."""

import asyncio
import subprocess
import sys
import threading

import pytest

from slipstream.configs.runtime.threads import SerialThread, Teardown, cancel_tasks

DEADLINE_S = 60.0


# --- SerialThread ----------------------------------------------------------------------------------------------------


async def test_serial_thread_returns_results_and_exceptions() -> None:
    thread = SerialThread()
    with pytest.raises(ValueError, match="'x'"):
        await thread.call(int, "x", deadline_s=DEADLINE_S)
    assert await thread.call(int, "3", deadline_s=DEADLINE_S) == 3


async def test_hanging_call_is_replaced_by_another_thread() -> None:
    thread, may_end = SerialThread(), threading.Event()
    first = await thread.call(threading.current_thread, deadline_s=DEADLINE_S)
    with pytest.raises(TimeoutError):
        await thread.call(may_end.wait, deadline_s=0.05)
    second = await thread.call(threading.current_thread, deadline_s=DEADLINE_S)
    assert second is not first
    may_end.set()
    first.join(DEADLINE_S)
    assert not first.is_alive(), "it makes no further calls"
    assert await thread.call(threading.current_thread, deadline_s=DEADLINE_S) is second


HANGS = """
import asyncio, threading
from slipstream.configs.runtime.threads import SerialThread

async def main():
    started = asyncio.Event()
    loop = asyncio.get_running_loop()
    def hang():
        loop.call_soon_threadsafe(started.set)
        threading.Event().wait()
    call = asyncio.create_task(SerialThread().call(hang, deadline_s=60))
    await started.wait()

asyncio.run(main())
print("ended")
"""


def test_hanging_call_does_not_block_process_exit() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")


# --- Teardown --------------------------------------------------------------------------------------------------------


class Slow:
    """Its destructor blocks until it is allowed to end."""

    def __init__(self, may_end: threading.Event, ended: list[str]) -> None:
        self._may_end = may_end
        self._ended = ended

    def __del__(self) -> None:
        self._may_end.wait(DEADLINE_S)
        self._ended.append("ended")


def test_slow_destructors_block_only_the_wait() -> None:
    teardown, may_end, ended = Teardown(), threading.Event(), list[str]()
    for _ in range(3):
        teardown.release([Slow(may_end, ended)])
    teardown.wait(0.01)
    assert ended == []
    may_end.set()
    teardown.wait(DEADLINE_S)
    assert ended == ["ended"] * 3


# --- cancel_tasks ----------------------------------------------------------------------------------------------------


async def swallow(times: int) -> None:
    """Swallows that many cancellations."""
    for _ in range(times):
        try:
            await asyncio.sleep(DEADLINE_S)
        except asyncio.CancelledError:
            continue
    await asyncio.sleep(DEADLINE_S)


async def fail() -> None:
    raise ValueError("broken")


async def started(*tasks: "asyncio.Task[None]") -> None:
    """Lets the tasks reach their first wait."""
    await asyncio.wait(tasks, timeout=0)


async def test_task_that_swallows_cancellations_is_cancelled() -> None:
    tasks = asyncio.create_task(swallow(3)), asyncio.create_task(swallow(0))
    await started(*tasks)
    async with asyncio.timeout(DEADLINE_S):
        await cancel_tasks(*tasks)
    assert all(task.cancelled() for task in tasks)


async def test_failure_of_a_task_is_raised_once_all_ended() -> None:
    tasks = asyncio.create_task(fail()), asyncio.create_task(swallow(1))
    await started(*tasks)
    with pytest.raises(ValueError, match="broken"):
        await cancel_tasks(*tasks)
    assert all(task.done() for task in tasks)


async def test_cancelled_canceller_still_ends_the_tasks() -> None:
    others = asyncio.create_task(swallow(3)), asyncio.create_task(swallow(3))
    cancelling = asyncio.create_task(cancel_tasks(*others))
    await started(*others, cancelling)
    async with asyncio.timeout(DEADLINE_S):
        while not cancelling.done():
            cancelling.cancel()
            await asyncio.wait([cancelling], timeout=0.01)
    assert cancelling.cancelled()
    assert all(task.cancelled() for task in others)
