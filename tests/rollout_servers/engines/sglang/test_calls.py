"""Calls of a server that refuses, fails, hangs or crashes."""

import asyncio
import os
import signal
from collections.abc import Awaitable
from contextlib import suppress

import pytest

from slipstream.rollout_servers.engines.base import EngineError, RequestRefused
from slipstream.rollout_servers.engines.sglang import server as module
from slipstream.rollout_servers.engines.sglang.engine import abort_on_error
from slipstream.rollout_servers.engines.sglang.server import Calls, ServerProcess

LONG_S = 60.0


@pytest.fixture
def calls(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.setattr(module, "_EXIT_S", 0.1)
    return Calls(server, update_deadline_s=LONG_S)


async def crashed(call: Awaitable[object], reason: str) -> None:
    """Asserts that a call fails because of a crash."""
    with pytest.raises(EngineError, match=reason) as error:
        async with asyncio.timeout(LONG_S):
            await call
    assert not isinstance(error.value, RequestRefused)


@pytest.mark.parametrize("path", ["/refused", "/failed"])
async def test_error_of_a_healthy_server_refuses_the_request(calls: Calls, path: str) -> None:
    with pytest.raises(RequestRefused, match=path):
        await calls.post(path, {})
    assert await calls.post("/echo", {"a": 1}) == b'{"a":1}'
    assert b"FOR_THE_STUB" in await calls.get("/environment")


async def test_error_of_an_unhealthy_server_is_a_crash(calls: Calls) -> None:
    await calls.post("/sickens", {})
    for call in (calls.post("/failed", {}), calls.post("/echo", {}), calls.get("/environment")):
        await crashed(call, "the engine core is dead")


async def test_missed_deadline_is_a_crash(calls: Calls) -> None:
    calls.deadline_s = 0.1
    for _ in range(2):
        await crashed(calls.post("/hangs", {}), r"0\.1 s")


async def test_unreadable_answer_is_a_crash(calls: Calls) -> None:
    with pytest.raises(EngineError, match="garbage"):
        async with calls.classified():
            raise EngineError("garbage")
    await crashed(calls.get("/environment"), "garbage")


async def test_exit_of_the_process_fails_all_calls(
    calls: Calls, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EXIT_S", LONG_S)
    waiting = [asyncio.ensure_future(calls.post("/hangs", {})) for _ in range(3)]
    await calls.post("/echo", {})
    os.kill(server.pid, signal.SIGKILL)
    for each in waiting:
        await crashed(each, "the stub .* SIGKILL")
    with pytest.raises(EngineError, match="SIGKILL"):
        calls.check_alive()


async def test_declared_crash_fails_all_calls(calls: Calls, server: ServerProcess) -> None:
    async def waits() -> None:
        async with calls.until_crash():
            await asyncio.Event().wait()

    async def streams() -> None:
        async with calls.classified():
            await server.client.stream("/hangs", {}, print, deadline_s=LONG_S)

    waiting = [asyncio.ensure_future(each) for each in (waits(), streams(), calls.post("/hangs", {}))]
    await calls.post("/echo", {})
    assert str(calls.fail("half of it")) == "half of it"
    assert str(calls.fail("something else")) == "half of it", "the first reason counts"
    for each in (*waiting, calls.post("/echo", {}), waits()):
        await crashed(each, "half of it")
    assert await server.healthy()


async def test_cancelled_call_is_no_crash(calls: Calls) -> None:
    waiting = asyncio.ensure_future(calls.post("/hangs", {}))
    await calls.post("/echo", {})
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    calls.check_alive()
    calls.fail("later")


async def test_crash_during_an_abort_is_reported(calls: Calls) -> None:
    aborting = asyncio.Event()

    async def abort() -> None:
        with suppress(EngineError):
            async with calls.until_crash():
                aborting.set()
                await asyncio.Event().wait()

    async def ask() -> None:
        async with calls.classified(), abort_on_error(abort):
            raise EngineError("the connection broke")

    asking = asyncio.create_task(ask())
    await aborting.wait()
    calls.fail("half of it")
    await crashed(asking, "half of it")
