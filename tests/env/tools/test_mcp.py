"""Tools of real MCP servers in processes of their own: calls, restarts, ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.run import ToolConfig
from slipstream.env.base import ToolCall
from slipstream.env.tools import mcp as tool_mcp
from slipstream.env.tools.mcp import Mcp
from slipstream.env.tools.schema import ToolError, ToolUnavailable
from slipstream.env.tools.session import LimitedToolbox, run_calls
from tests.conftest import free_port

pytest.importorskip("mcp")

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = [sys.executable, str(SERVER)]
DEADLINE_S = 60.0
NAMES = ["add", "count", "process", "wait", "complain", "fail", "end", "leave_child"]


@pytest.fixture
def make() -> Iterator[Callable[..., Mcp]]:
    made: list[Mcp] = []

    def build(**options: Any) -> Mcp:
        given: dict[str, Any] = {"command": COMMAND, "start_deadline_s": DEADLINE_S} | options
        made.append(Mcp(**given))
        return made[-1]

    yield build
    for box in made:
        box.close()


@pytest.fixture(scope="module")
def stdio() -> Iterator[Mcp]:
    """One for the tests that don't end its server."""
    box = Mcp(COMMAND, start_deadline_s=DEADLINE_S)
    yield box
    box.close()


class HttpServer:
    """A server over HTTP in a process."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([*COMMAND, str(self.port)], stderr=subprocess.DEVNULL)

    def connected(self) -> Mcp:
        until = time.monotonic() + DEADLINE_S
        while True:
            try:
                return Mcp(url=self.url, start_deadline_s=DEADLINE_S)
            except ConfigError:
                assert time.monotonic() < until, "the server did not start"
                time.sleep(0.05)


@pytest.fixture
def http() -> Iterator[HttpServer]:
    server = HttpServer()
    yield server
    server.process.kill()
    server.process.wait()


async def call(box: Mcp, name: str, **arguments: Any) -> str:
    async with AsyncExitStack() as episode:
        tools = {tool.name: tool for tool in await box.open(episode)}
        return await asyncio.wait_for(tools[name].call(arguments), DEADLINE_S)


def runs(process: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def wait_until_gone(process: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while runs(process):
            await asyncio.sleep(0.01)


async def test_tools_are_listed_and_called_over_stdio(stdio: Mcp) -> None:
    assert [tool.name for tool in stdio.tools] == NAMES
    described = stdio.tools[0].schema["function"]
    assert (described["description"], sorted(described["parameters"]["required"])) == ("Adds two numbers.", ["a", "b"])
    assert await call(stdio, "add", a=2, b=3) == "5"
    assert await asyncio.gather(*(call(stdio, "add", a=n, b=1) for n in range(50))) == [str(n + 1) for n in range(50)]


async def test_error_of_a_tool_is_an_observation(stdio: Mcp) -> None:
    with pytest.raises(ToolError, match="the reason"):
        await call(stdio, "fail")
    with pytest.raises(ToolError, match="valid integer"):
        await call(stdio, "add", a="x", b=1)


async def test_late_call_keeps_the_server(stdio: Mcp) -> None:
    before = await call(stdio, "process")
    box = LimitedToolbox(stdio, ToolConfig(name="mcp", deadline_s=0.2))
    messages, metrics = await run_calls(
        [ToolCall("0", "wait", {"seconds": 60}), ToolCall("1", "add", {"a": 1, "b": 2})],
        {limited.tool.name: limited for limited in box.tools},
    )
    assert metrics["tool_timeouts"] >= 1  # the other may be late as well, on a busy machine
    assert messages[0]["content"].startswith("error: ")
    assert await call(stdio, "process") == before


async def test_tools_are_called_over_http(http: HttpServer) -> None:
    box = http.connected()
    try:
        assert [tool.name for tool in box.tools] == NAMES
        assert await call(box, "add", a=2, b=3) == "5"
        http.process.kill()
        http.process.wait()
        with pytest.raises(ToolUnavailable, match=str(http.port)):
            await call(box, "add", a=2, b=3)
        http.start()
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    assert await call(box, "add", a=2, b=3) == "5"
                    break
                except ToolUnavailable:
                    await asyncio.sleep(0.05)
    finally:
        box.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_dead_server_is_restarted(
    make: Callable[..., Mcp], how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_mcp, "CHECK_S", 0.5)
    box = make()
    (before, _) = json.loads(f"[{(await call(box, 'process')).replace(chr(10), ',')}]")
    os.kill(before, how)
    if how == signal.SIGSTOP:  # seen by the check that follows a late call
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(box.tools[0].call({"a": 1, "b": 2}), 0.1)
    assert await call(box, "add", a=2, b=3) == "5"
    after, _ = json.loads(f"[{(await call(box, 'process')).replace(chr(10), ',')}]")
    assert after != before
    await wait_until_gone(before)


@dataclass
class Gate:
    """A folder without whose file `open` servers do not start; they leave files with their process ids there."""

    folder: Path

    def __post_init__(self) -> None:
        (self.folder / "open").touch()
        self.options: dict[str, Any] = {"environment": {"FOLDER": str(self.folder)}}

    def close(self) -> None:
        (self.folder / "open").unlink()

    def open(self) -> None:
        (self.folder / "open").touch()

    @property
    def processes(self) -> list[int]:
        return [int(file.name) for file in self.folder.iterdir() if file.name != "open"]

    async def wait_for(self, count: int) -> list[int]:
        """Once so many servers were started altogether, those of them that run."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.processes) < count:
                await asyncio.sleep(0.01)
        return [process for process in self.processes if runs(process)]


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


async def test_calls_share_a_restart_that_outlasts_their_deadlines(make: Callable[..., Mcp], gate: Gate) -> None:
    box = make(**gate.options)
    (first,) = gate.processes
    gate.close()
    os.kill(first, signal.SIGKILL)
    for _ in range(3):
        calls = [asyncio.wait_for(box.tools[0].call({"a": 1, "b": 2}), 0.2) for _ in range(2)]
        assert {type(error) for error in await asyncio.gather(*calls, return_exceptions=True)} == {TimeoutError}
    (second,) = await gate.wait_for(2)
    waiting = [asyncio.create_task(call(box, "add", a=2, b=number)) for number in range(3)]
    gate.open()
    assert await asyncio.gather(*waiting) == ["2", "3", "4"]
    assert (await call(box, "process")).split()[0] == str(second)
    assert set(gate.processes) == {first, second}


async def test_restarts_back_off(make: Callable[..., Mcp], gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_mcp, "RETRY_S", 600.0)
    box = make(**gate.options)
    gate.close()
    os.kill(gate.processes[0], signal.SIGKILL)
    box.start_deadline_s = 0.5
    for _ in range(3):
        with pytest.raises(ToolUnavailable, match=r"0\.5 s"):
            await call(box, "add", a=1, b=2)
    assert len(gate.processes) <= 2, "on a busy machine the second may be ended before it runs"
    assert not any(map(runs, gate.processes))


@pytest.mark.parametrize("servers", [0, 1])
async def test_server_whose_start_is_interrupted_ends(make: Callable[..., Mcp], gate: Gate, servers: int) -> None:
    """By its tool's end; if it is an episode's own, by the episode's end too."""
    box = make(**gate.options, servers=servers)
    gate.close()
    if not servers:
        os.kill(gate.processes[0], signal.SIGKILL)
    for count in (2, 3) if servers else (2,):
        starting = asyncio.create_task(call(box, "add", a=1, b=2))
        (process,) = await gate.wait_for(count)
        if count == 2 and servers:
            starting.cancel()
        else:
            await asyncio.to_thread(box.close)
        await wait_until_gone(process)
        with pytest.raises((ToolUnavailable, asyncio.CancelledError)):
            await asyncio.wait_for(starting, DEADLINE_S)


async def test_call_that_ends_its_server_is_an_observation(make: Callable[..., Mcp]) -> None:
    box = make()
    with pytest.raises(ToolError):
        await call(box, "end")
    assert await call(box, "add", a=2, b=3) == "5"
    child = int(await call(box, "leave_child"))
    assert runs(child)
    await asyncio.to_thread(box.close)
    await wait_until_gone(child)


async def test_server_that_does_not_start_again_costs_the_episode(make: Callable[..., Mcp], tmp_path: Path) -> None:
    program = tmp_path / "server.py"
    program.write_text(SERVER.read_text())
    box = make(command=[sys.executable, str(program)])
    program.write_text("import sys; sys.exit('it is broken')")
    for _ in range(2):
        with pytest.raises(ToolUnavailable, match="it is broken"):
            await call(box, "end")


async def test_episodes_have_servers_of_their_own(make: Callable[..., Mcp]) -> None:
    box = make(servers=1, tools=["count", "process", "end"])
    processes = []
    for _ in range(2):
        async with AsyncExitStack() as episode:
            tools = {tool.name: tool for tool in await box.open(episode)}
            assert [await tools["count"].call({}) for _ in range(2)] == ["1", "2"]
            processes.append(int((await tools["process"].call({})).split()[0]))
        await wait_until_gone(processes[-1])
    assert len(set(processes)) == 2
    async with AsyncExitStack() as episode:
        (_, _, end) = await box.open(episode)
        with pytest.raises(ToolUnavailable):
            await end.call({})


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"command": []}, "command"),
        ({"command": "server"}, "command"),
        ({"url": "http://127.0.0.1:1/mcp"}, "command"),
        ({"command": [], "url": "http://127.0.0.1:1/mcp"}, "127.0.0.1:1"),
        ({"command": ["/no/such/program"]}, "/no/such/program"),
        ({"command": [sys.executable, "-c", "raise SystemExit('wrong key')"]}, "wrong key"),
        ({"command": ["sleep", "60"], "start_deadline_s": 0.5}, "0.5 s"),
        ({"tools": ["add", "sub"]}, "sub"),
    ],
    ids=["nothing", "text", "both", "no listener", "no program", "exits", "hangs", "no such tool"],
)
def test_unusable_server_is_refused_at_start(make: Callable[..., Mcp], options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        make(**options)


async def test_stderr_goes_to_a_bounded_file(
    make: Callable[..., Mcp], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_mcp, "STDERR_BYTES", 1000)
    monkeypatch.setattr(tool_mcp, "STDERR_CHECK_S", 0.01)
    file = tmp_path / "stderr"
    box = make(stderr=str(file), environment={"MARK": "marked"})
    assert "to stderr marked" in file.read_text()
    for characters in (2000, 10):
        await call(box, "complain", characters=characters)
        async with asyncio.timeout(DEADLINE_S):
            while file.stat().st_size > 1000:
                await asyncio.sleep(0.01)
    assert file.read_text() == "x" * 10


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_servers_end_with_a_killed_process(number: signal.Signals) -> None:
    program = f"""
        import asyncio, signal, sys, time
        from contextlib import AsyncExitStack
        from slipstream.env.tools.mcp import Mcp
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        shared, own = (Mcp({COMMAND!r}, servers=servers, start_deadline_s={DEADLINE_S}) for servers in (0, 4))
        async def main():
            async with AsyncExitStack() as episode:
                for box in (shared, own):
                    tools = {{tool.name: tool for tool in await box.open(episode)}}
                    print((await tools["process"].call({{}})).split()[0], flush=True)
                time.sleep(600)
        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        servers = [int(await asyncio.to_thread(owner.stdout.readline)) for _ in range(2)]
        owner.send_signal(number)
        for server in servers:
            await wait_until_gone(server)
