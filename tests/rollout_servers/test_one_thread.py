"""Calls beside an event loop, from one thread."""

import subprocess
import sys

import pytest

from slipstream.rollout_servers.one_thread import OneThread

HANGS = """
import asyncio, threading
from slipstream.rollout_servers.one_thread import OneThread

async def main():
    started = asyncio.Event()
    loop = asyncio.get_running_loop()
    def hang():
        loop.call_soon_threadsafe(started.set)
        threading.Event().wait()
    call = asyncio.create_task(OneThread().call(hang))
    await started.wait()

asyncio.run(main())
print("ended")
"""


async def test_what_a_call_returns_or_raises_comes_to_whoever_made_it() -> None:
    thread = OneThread()
    with pytest.raises(ValueError, match="invalid literal"):
        await thread.call(int, "x")
    assert await thread.call(int, "3") == 3


def test_a_call_that_hangs_does_not_keep_the_process_from_ending() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")
