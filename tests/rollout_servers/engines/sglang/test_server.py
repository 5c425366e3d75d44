"""Servers as child processes; a stub stands for the engine's."""

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from slipstream.rollout_servers.engines.base import EngineError, RequestRefused
from slipstream.rollout_servers.engines.sglang import server as launch
from slipstream.rollout_servers.engines.sglang.arguments import Command
from slipstream.rollout_servers.engines.sglang.engine import abort_on_error
from slipstream.rollout_servers.engines.sglang.server import Calls, EngineClient, FailedAnswer, ServerProcess
from tests.conftest import free_port
from tests.rollout_servers.engines.sglang.http_stub import command, serve

LONG_S = 60.0
OWNER = """
import asyncio, sys
from pathlib import Path
from slipstream.rollout_servers.engines.sglang.arguments import Command
from slipstream.rollout_servers.engines.sglang.server import ServerProcess

async def main():
    port, console, *arguments = sys.argv[1:]
    command = Command("stub", arguments, {}, int(port), "/health", Path(console))
    server = await ServerProcess.start(command, deadline_s=60)
    print(server.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
"""A process that starts a server and waits to be killed."""


def worker_in(console: Path) -> int:
    """The id of a stub's child, from its console."""
    (line,) = [line for line in console.read_text().splitlines() if line.startswith("worker")]
    return int(line.split()[1])


def memory_in(folder: Path) -> Path:
    """The shared memory of a stub, from its console."""
    console = folder / "logs" / "stub.engine.console"
    (line,) = [line for line in console.read_text().splitlines() if line.startswith("memory")]
    return Path("/dev/shm") / line.split()[1]


def wait_until(met: Callable[[], bool], *, deadline_s: float = LONG_S) -> None:
    give_up = time.monotonic() + deadline_s
    while not met():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def has_ended(process_id: int) -> bool:
    try:
        return bool(psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def test_started_server_has_its_environment_and_console(server: ServerProcess, tmp_path: Path) -> None:
    environment = json.loads(await server.client.get("/environment", deadline_s=LONG_S))
    assert environment["FOR_THE_STUB"] == "1"
    assert environment["PATH"] == os.environ["PATH"]
    assert await server.healthy()
    assert server.exit_report() is None
    assert not has_ended(worker_in(tmp_path / "logs" / "stub.engine.console"))


async def test_failed_start_reports_last_lines_without_frames(tmp_path: Path) -> None:
    failing = command(tmp_path, "dies")
    failing.console.parent.mkdir()
    failing.console.write_text("an earlier server\n")
    with pytest.raises(EngineError, match=r"the stub \(process \d+\) ended with exit code 1") as crash:
        await ServerProcess.start(failing, deadline_s=LONG_S)
    assert str(crash.value).endswith("Traceback (most recent call last):\n  RuntimeError: no such model")
    assert "an earlier server" not in str(crash.value)
    assert failing.console.read_text().startswith("an earlier server\n")


@pytest.mark.parametrize(
    ("python", "folder", "reason"),
    [("/no/such/python", "logs", "No such file"), (sys.executable, "full", "full")],
    ids=["interpreter", "console"],
)
async def test_server_that_can_not_start_is_an_engine_error(
    tmp_path: Path, python: str, folder: str, reason: str
) -> None:
    (tmp_path / "full").write_text("")
    missing = Command("the stub", [python], {}, free_port(), "/health", tmp_path / folder / "console")
    with pytest.raises(EngineError, match=reason):
        await ServerProcess.start(missing, deadline_s=LONG_S)


async def test_unhealthy_server_is_ended_at_the_deadline(tmp_path: Path) -> None:
    sick = command(tmp_path, "sick")
    with pytest.raises(EngineError, match=r"the stub .* 5 s(.|\n)*\n  worker "):
        await ServerProcess.start(sick, deadline_s=5.0)
    worker = worker_in(sick.console)
    wait_until(lambda: has_ended(worker))


async def test_cancelled_start_leaves_no_process(tmp_path: Path) -> None:
    sick = command(tmp_path, "sick")
    starting = asyncio.create_task(ServerProcess.start(sick, deadline_s=LONG_S))
    while not sick.console.exists() or "worker" not in sick.console.read_text():
        assert not starting.done()
        await asyncio.sleep(0.01)
    worker = worker_in(sick.console)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    wait_until(lambda: has_ended(worker))


async def test_closing_ends_the_server_and_its_children(tmp_path: Path) -> None:
    server = await ServerProcess.start(command(tmp_path), deadline_s=LONG_S)
    worker, memory = worker_in(tmp_path / "logs" / "stub.engine.console"), memory_in(tmp_path)
    assert memory.exists()
    await server.close()
    assert not memory.exists()
    assert server.ended.result() == f"the stub (process {server.pid}) ended with signal SIGTERM"
    wait_until(lambda: has_ended(worker))
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


async def test_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    server = await ServerProcess.start(command(tmp_path, "stubborn"), deadline_s=LONG_S)
    await server.close()
    assert server.ended.result().endswith("ended with signal SIGKILL")


async def test_killed_server_fails_calls_and_takes_its_children(server: ServerProcess, tmp_path: Path) -> None:
    worker, memory = worker_in(tmp_path / "logs" / "stub.engine.console"), memory_in(tmp_path)
    assert memory.exists()
    waiting = asyncio.create_task(server.client.post("/hangs", {}, deadline_s=LONG_S))
    await server.client.post("/echo", {}, deadline_s=LONG_S)
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="no connection to the stub"):
        await waiting
    async with asyncio.timeout(LONG_S):
        assert (await server.ended).endswith("ended with signal SIGKILL")
    assert not await server.healthy()
    await asyncio.to_thread(wait_until, lambda: has_ended(worker))


async def test_server_ends_with_its_owner(tmp_path: Path) -> None:
    stub = command(tmp_path)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(stub.port), stub.console, *stub.arguments], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    with owner.stdout as printed:
        server = psutil.Process(int(await asyncio.to_thread(printed.readline)))
        members = [process.pid for process in (server, *server.children(recursive=True))]
        assert worker_in(stub.console) in members
        owner.kill()
        owner.wait()
        await asyncio.to_thread(wait_until, lambda: all(has_ended(member) for member in members))


# --- hTTP with an engine's server -------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def client() -> AsyncIterator[EngineClient]:
    """A client of a stub in threads of this process."""
    port = free_port()
    server = serve(port)
    client = EngineClient("the stub", f"http://127.0.0.1:{port}")
    yield client
    await client.close()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("path", "kind", "reason"),
    [
        ("/refused", RequestRefused, "400: the prompt is too long"),
        ("/unknown", RequestRefused, "404: Not Found"),
        ("/failed", FailedAnswer, "500: the engine core is dead"),
        ("/garbled", FailedAnswer, "500: <html>"),
    ],
)
async def test_http_error_has_its_kind_and_reason(
    client: EngineClient, path: str, kind: type[EngineError], reason: str
) -> None:
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: client.post(path, {}, deadline_s=LONG_S),
        lambda: client.stream(path, {}, print, deadline_s=LONG_S),
    ]
    for call in calls:
        with pytest.raises(kind, match=f"the stub .*{path} with {reason}"):
            await call()
    assert await client.healthy("/health", deadline_s=LONG_S), "the server closes the connection after an error"


@pytest.mark.parametrize(
    ("path", "deadline_s", "reason"), [("/hangs", 0.1, r"0\.1 s"), ("/hangs-up", LONG_S, "no connection")]
)
async def test_missing_answer_is_an_error(client: EngineClient, path: str, deadline_s: float, reason: str) -> None:
    with pytest.raises(EngineError, match=f"the stub .*{path}") as error:
        await client.post(path, {}, deadline_s=deadline_s)
    assert error.match(reason)


async def test_missing_file_descriptors_are_named(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_socket(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", no_socket)
    with pytest.raises(EngineError, match=r"the stub .*Too many open files"):
        await client.post("/echo", {}, deadline_s=LONG_S)


async def test_absent_server_is_not_healthy() -> None:
    client = EngineClient("nobody", f"http://127.0.0.1:{free_port()}")
    assert not await client.healthy("/health", deadline_s=LONG_S)
    with pytest.raises(EngineError, match="no connection to nobody"):
        await client.get("/metrics", deadline_s=LONG_S)
    await client.close()


async def test_closing_fails_pending_and_later_calls(client: EngineClient) -> None:
    pending = asyncio.ensure_future(client.post("/hangs", {}, deadline_s=LONG_S))
    await client.post("/echo", {}, deadline_s=LONG_S)
    await client.close()
    for call in (
        pending,
        client.get("/environment", deadline_s=LONG_S),
        client.post("/echo", {}, deadline_s=LONG_S),
        client.stream("/events", [], print, deadline_s=LONG_S),
    ):
        with pytest.raises(EngineError, match="the stub at http:"):
            await call
    assert not await client.healthy("/health", deadline_s=LONG_S)


@pytest.mark.parametrize("sent", [["1", "2", "3"], ["a\u2028b\u0085c\x0bd\re"]], ids=["several", "unicode-lines"])
async def test_stream_yields_events_in_order(client: EngineClient, sent: list[str]) -> None:
    events: list[str] = []
    await client.stream("/events", sent, events.append, deadline_s=LONG_S)
    assert events == sent


async def test_stream_without_its_last_event_is_an_error(client: EngineClient) -> None:
    events: list[str] = []
    with pytest.raises(EngineError):
        await client.stream("/events-cut", ["1"], events.append, deadline_s=LONG_S)
    assert events == ["1"]


async def test_proxy_is_not_used_on_loopback(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    other = EngineClient("the stub", client.url)
    assert await other.healthy("/health", deadline_s=LONG_S)
    await other.close()


async def test_many_calls_run_concurrently(client: EngineClient) -> None:
    hanging = [asyncio.create_task(client.post("/hangs", {}, deadline_s=LONG_S)) for _ in range(120)]
    assert await client.post("/echo", {}, deadline_s=LONG_S) == b"{}"
    for each in hanging:
        each.cancel()
    await asyncio.wait(hanging)


# --- calls of a server that refuses, fails, hangs or crashes ----------------------------------------------------------


@pytest.fixture
def calls(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.setattr(launch, "_EXIT_S", 0.1)
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
    monkeypatch.setattr(launch, "_EXIT_S", LONG_S)
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
