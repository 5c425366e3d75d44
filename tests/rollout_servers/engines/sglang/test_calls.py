"""Calls of a server that refuses, fails, hangs and dies."""

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
def calls(server: ServerProcess) -> Calls:
    return Calls(server, update_deadline_s=LONG_S)


async def hear_of(death: Awaitable[object], reason: str) -> None:
    with pytest.raises(EngineError, match=reason) as error:
        async with asyncio.timeout(LONG_S):
            await death
    assert not isinstance(error.value, RequestRefused)


@pytest.mark.parametrize("path", ["/refused", "/failed"])
async def test_what_a_healthy_server_can_not_answer_is_refused_and_the_next_call_is_answered(
    calls: Calls, path: str
) -> None:
    with pytest.raises(RequestRefused, match=f"the stub answered {path}"):
        await calls.post(path, {})
    assert await calls.post("/echo", {"a": 1}) == b'{"a":1}'
    assert b"FOR_THE_STUB" in await calls.get("/environment")


async def test_a_server_that_fails_and_is_not_healthy_is_dead_and_nothing_more_is_asked(calls: Calls) -> None:
    await calls.post("/sickens", {})
    for call in (calls.post("/failed", {}), calls.post("/echo", {}), calls.get("/environment")):
        await hear_of(call, "the engine core is dead")


async def test_a_server_that_does_not_answer_in_time_is_dead(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_EXIT_S", 0.1)
    calls.deadline_s = 0.1
    for _ in range(2):
        await hear_of(calls.post("/hangs", {}), "did not answer within 0.1 s")


async def test_the_end_of_the_process_is_the_reason_that_all_who_wait_hear(calls: Calls, server: ServerProcess) -> None:
    waiting = [asyncio.ensure_future(calls.post("/hangs", {})) for _ in range(3)]
    await calls.post("/echo", {})
    os.kill(server.pid, signal.SIGKILL)
    for each in waiting:
        await hear_of(each, "the stub .* ended with signal SIGKILL; the last lines of ")
    with pytest.raises(EngineError, match="ended with signal SIGKILL"):
        calls.check_alive()


async def test_all_who_wait_hear_of_a_death_that_is_declared_though_the_server_lives_on(
    calls: Calls, server: ServerProcess
) -> None:
    async def waits() -> None:
        async with calls.until_crash():
            await asyncio.Event().wait()

    async def streams() -> None:
        async with calls.classified():
            await server.client.stream("/hangs", {}, print, deadline_s=LONG_S)

    waiting = [asyncio.ensure_future(each) for each in (waits(), streams(), calls.post("/hangs", {}))]
    await calls.post("/echo", {})
    assert str(calls.fail("half of it is there")) == "half of it is there"
    assert str(calls.fail("something else")) == "half of it is there", "the first reason counts"
    for each in (*waiting, calls.post("/echo", {}), waits()):
        await hear_of(each, "half of it is there")
    assert await server.healthy()


async def test_an_answer_that_can_not_be_read_is_the_death_of_its_server(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EXIT_S", 0.1)
    with pytest.raises(EngineError, match="garbage"):
        async with calls.classified():
            raise EngineError("garbage")
    await hear_of(calls.get("/environment"), "garbage")


async def test_who_is_cancelled_is_not_told_of_a_death(calls: Calls) -> None:
    waiting = asyncio.ensure_future(calls.post("/hangs", {}))
    await calls.post("/echo", {})
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    calls.check_alive()
    calls.fail("later")


async def test_who_is_giving_up_what_failed_hears_of_a_death_as_of_any_other(calls: Calls) -> None:
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
    calls.fail("half of it is there")
    await hear_of(asking, "half of it is there")
