"""Calls beside an event loop, from one thread."""

import subprocess
import sys
import threading

import pytest

from slipstream.configs.runtime.threads import SerialThread

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


async def test_what_a_call_returns_or_raises_comes_to_whoever_made_it() -> None:
    thread = SerialThread()
    with pytest.raises(ValueError, match="invalid literal"):
        await thread.call(int, "x", deadline_s=60)
    assert await thread.call(int, "3", deadline_s=60) == 3


async def test_a_call_that_hangs_is_given_up_and_others_are_made_from_another_thread() -> None:
    thread, may_end = SerialThread(), threading.Event()
    first = await thread.call(threading.current_thread, deadline_s=60)
    with pytest.raises(TimeoutError):
        await thread.call(may_end.wait, deadline_s=0.05)
    second = await thread.call(threading.current_thread, deadline_s=60)
    assert second is not first
    may_end.set()
    first.join(60)
    assert not first.is_alive(), "it makes no further calls"
    assert await thread.call(threading.current_thread, deadline_s=60) is second


def test_a_call_that_hangs_does_not_keep_the_process_from_ending() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")
