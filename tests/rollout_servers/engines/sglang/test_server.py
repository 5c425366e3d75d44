"""Servers as child processes; a stub stands for the engine's."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from slipstream.rollout_servers.engines.base import EngineError
from slipstream.rollout_servers.engines.sglang import server as launch
from slipstream.rollout_servers.engines.sglang.arguments import Command
from slipstream.rollout_servers.engines.sglang.server import ServerProcess
from tests.conftest import free_port
from tests.rollout_servers.engines.sglang.http_stub import command

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
    worker = worker_in(tmp_path / "logs" / "stub.engine.console")
    await server.close()
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
    worker = worker_in(tmp_path / "logs" / "stub.engine.console")
    waiting = asyncio.create_task(server.client.post("/hangs", {}, deadline_s=LONG_S))
    await server.client.post("/echo", {}, deadline_s=LONG_S)
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="no connection to the stub"):
        await waiting
    async with asyncio.timeout(LONG_S):
        assert (await server.ended).endswith("ended with signal SIGKILL")
    assert not await server.healthy()
    await asyncio.to_thread(wait_until, lambda: has_ended(worker))


@pytest.mark.parametrize("killed", [True, False])
async def test_shared_memory_of_a_server_is_freed(tmp_path: Path, killed: bool) -> None:
    stub = command(tmp_path)
    server = await ServerProcess.start(stub, deadline_s=LONG_S)
    (line,) = [line for line in stub.console.read_text().splitlines() if line.startswith("memory")]
    memory = Path("/dev/shm") / line.split()[1]
    assert memory.exists()
    if killed:
        os.kill(server.pid, signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: not memory.exists())
    await server.close()
    assert not memory.exists()


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


async def test_several_servers_run_at_once(server: ServerProcess, tmp_path: Path) -> None:
    other = await ServerProcess.start(command(tmp_path / "other"), deadline_s=LONG_S)
    os.kill(other.pid, signal.SIGKILL)
    await other.ended
    await other.close()
    assert await server.healthy()
