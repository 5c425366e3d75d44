"""SGLang's server as a child process: start, health, calls, crash detection, shutdown of all its processes (Linux)."""

import asyncio
import json
import os
import random
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.configs.runtime import processes as guard
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.threads import run_in_thread
from slipstream.configs.schema import RunConfig
from slipstream.rollout_servers.engines.base import EngineError, RequestRefused
from slipstream.rollout_servers.engines.sglang.client import EngineClient, FailedAnswer

log = get_log("rollout.engine")


@dataclass(frozen=True)
class Command:
    """Command line of a server.

    Attributes:
        name: the server, in errors.
        arguments: the command line, without a shell.
        environment: variables added to this process's own.
        port: its port on loopback.
        health: the path that answers with success once it is ready.
        console: the file to which its output is appended.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    port: int
    health: str
    console: Path


def server_command(
    config: RunConfig,
    *,
    name: str,
    python: str,
    module: str,
    flags: Sequence[str],
    environment: Mapping[str, str],
    health: str,
) -> Command:
    """`python -m module` with `flags`, on loopback; its console lies in the run's folder, beside this process's logs.

    Raises: EngineError when no port is free.
    """
    port = free_port()
    return Command(
        name=name,
        arguments=[python, "-m", module, *flags, "--host", "127.0.0.1", "--port", str(port)],
        environment=environment,
        port=port,
        health=health,
        console=config.paths.logs / f"rollout-{socket.gethostname()}-{os.getpid()}-{port}.engine.console",
    )


def command_line_flags(arguments: Mapping[str, Any]) -> list[str]:
    """`{"tensor_parallel_size": 2}` as `--tensor-parallel-size 2`.

    A mapping is JSON, a sequence several words, True the flag alone; None and False leave the flag out.
    """
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is not None and value is not False:
            flags += [f"--{flag}", *_words(value)]
    return flags


def free_port() -> int:
    """A random loopback port without a listener: the health of another server must not be taken for this one's.

    It is below the range that the kernel takes ports for outgoing connections from, because one of those could take it
    before the server listens on it; at random, so that servers that start at the same time differ.

    Raises: EngineError when none of a hundred is free.
    """
    for port in random.sample(range(15_000, 32_000), 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise EngineError("no port from 15000 to 31999 is free on loopback for the engine's server")


def _words(value: Any) -> list[str]:
    if value is True:
        return []
    if isinstance(value, Mapping):
        return [json.dumps(value)]
    return [str(word) for word in (value if isinstance(value, list | tuple) else [value])]


LAST_LINES = 20
GRACE_S = 10.0
"""Between SIGTERM and SIGKILL."""
REAP_S = 5.0
"""How long the kernel may take to end a process that is killed."""
_HEALTH_EVERY_S = 0.1
_HEALTH_DEADLINE_S = 5.0


class ServerProcess:
    """A running server.

    Attributes:
        client: its HTTP client.
        ended: done once its process has exited; the result describes the exit status.
    """

    def __init__(
        self, command: Command, process: asyncio.subprocess.Process, marker: str, *, console_start: int
    ) -> None:
        self._command = command
        self._process = process
        self._marker = os.fsencode(marker)
        self._console_start = console_start
        self.client = EngineClient(command.name, f"http://127.0.0.1:{command.port}")
        self.ended: asyncio.Future[str] = asyncio.ensure_future(self._watch())

    @classmethod
    async def start(cls, command: Command, *, deadline_s: float) -> "ServerProcess":
        """Returns once the server is healthy.

        Raises: EngineError with the last lines that it printed when it ends, or is not healthy within `deadline_s`; or
        when this host has no room for its console or for another process.
        """
        try:
            server = await cls._begin(command)
        except OSError as error:
            raise EngineError(f"{command.name} could not be started: {error}") from error
        try:
            async with asyncio.timeout(deadline_s):
                await server._until_healthy()
        except BaseException as reason:
            printed = server.last_lines()
            await server.close()
            if isinstance(reason, TimeoutError):
                raise EngineError(f"{command.name} was not healthy within {deadline_s:g} s; {printed}") from None
            raise
        return server

    @classmethod
    async def _begin(cls, command: Command) -> "ServerProcess":
        """Raises: OSError."""
        command.console.parent.mkdir(parents=True, exist_ok=True)
        marker = f"SLIPSTREAM_ENGINE={os.getpid()}-{time.time_ns()}"
        with command.console.open("ab") as output:
            console_start = output.tell()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__, marker, str(os.getpid()), *command.arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                # Safe path: otherwise `-m` searches the working folder first.
                env={**os.environ, "PYTHONSAFEPATH": "1", **command.environment},
                start_new_session=True,  # Ctrl-C in the terminal is not meant for it
            )
        return cls(command, process, marker, console_start=console_start)

    @property
    def pid(self) -> int:
        """The server's process, the leader of the group of all that it starts."""
        return self._process.pid

    def exit_report(self) -> str | None:
        """Exit status and last lines of output; None while it runs."""
        return f"{self.ended.result()}; {self.last_lines()}" if self.ended.done() else None

    def last_lines(self) -> str:
        """Last lines of output, for an error; without indented ones, the frames of tracebacks."""
        with self._command.console.open("rb") as lines:
            lines.seek(self._console_start)
            printed = (
                line.decode(errors="replace").rstrip() for line in lines if line.strip() and not line[:1].isspace()
            )
            last = deque(printed, maxlen=LAST_LINES)
        return "\n  ".join([f"the last lines of {self._command.console}:", *last])

    async def healthy(self) -> bool:
        """Whether the server reports itself healthy."""
        return await self.client.healthy(self._command.health, deadline_s=_HEALTH_DEADLINE_S)

    async def close(self) -> None:
        """Ends the server and all processes that it started."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        ended, _ = await asyncio.wait({self.ended}, timeout=GRACE_S)
        if not ended:
            log.warning("engine server ignored SIGTERM and is killed", engine=self._command.name, grace_s=GRACE_S)
        # What is left of its process tree, as its guard does when nobody closes it.
        await run_in_thread(guard.kill_members, [self.pid], self._marker)
        await asyncio.wait({self.ended}, timeout=REAP_S)
        await self.client.close()  # last: pending calls fail with the server's exit

    async def _until_healthy(self) -> None:
        while not await self.healthy():
            if (exit_report := self.exit_report()) is not None:
                raise EngineError(exit_report)
            await asyncio.wait({self.ended}, timeout=_HEALTH_EVERY_S)

    async def _watch(self) -> str:
        code = await self._process.wait()
        ending = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return f"{self._command.name} (process {self.pid}) ended with {ending}"


CALL_DEADLINE_S = 60.0
"""Least time limit of a call."""
_EXIT_S = 5.0
"""A process may exit this long after its connections break."""


class Calls:
    """Calls of a server; the first crash, detected by a call or declared by its owner, fails all of them.

    Attributes:
        deadline_s: time limit of a call; the server counts as crashed after it.
    """

    def __init__(self, server: ServerProcess, *, update_deadline_s: float) -> None:
        """A call may take as long as an update: it may be part of one, or wait for its end."""
        self.deadline_s = max(CALL_DEADLINE_S, update_deadline_s)
        self._server = server
        self._waiting: set[asyncio.Timeout] = set()
        self._crash: str | None = None

    async def get(self, path: str) -> bytes:
        """The answer to a GET. Raises: RequestRefused, EngineError."""
        async with self.classified():
            return await self._server.client.get(path, deadline_s=self.deadline_s)

    async def post(self, path: str, body: Any = None) -> bytes:
        """The answer to a POST of `body` as JSON. Raises: RequestRefused, EngineError."""
        async with self.classified():
            return await self._server.client.post(path, body, deadline_s=self.deadline_s)

    @asynccontextmanager
    async def classified(self) -> AsyncIterator[None]:
        """Classifies errors of the client's calls inside; cancels them when a crash is detected elsewhere.

        Raises: RequestRefused when a healthy server refuses or fails this request, EngineError when it has crashed.
        """
        try:
            async with self.until_crash():
                yield
        except RequestRefused:
            raise
        except EngineError as error:
            raise await self._classify(error) from error

    @asynccontextmanager
    async def until_crash(self) -> AsyncIterator[None]:
        """Cancels what is awaited inside when a crash is detected elsewhere. Raises: EngineError."""
        self.check_alive()
        try:
            async with asyncio.timeout(None) as waiting:
                self._waiting.add(waiting)
                yield
        except TimeoutError:
            assert waiting.expired(), "no TimeoutError of its own leaves the body"
            raise EngineError(str(self._crash)) from None
        finally:
            self._waiting.discard(waiting)

    def check_alive(self) -> None:
        """Raises: EngineError when the server has crashed."""
        death = self._crash or self._server.exit_report()
        if death is not None:
            raise self.fail(death)

    def fail(self, reason: str) -> EngineError:
        """Declares a crash and fails all pending calls; the first reason counts. Returns the error to raise."""
        self._crash = self._crash or reason
        pending, self._waiting = self._waiting, set()
        for waiting in pending:
            waiting.reschedule(asyncio.get_running_loop().time())
        return EngineError(self._crash)

    async def _classify(self, error: EngineError) -> EngineError:
        if self._crash is None:
            if isinstance(error, FailedAnswer):
                if await self._server.healthy():
                    return RequestRefused(str(error))
            else:
                await asyncio.wait({self._server.ended}, timeout=_EXIT_S)
        return self.fail(self._server.exit_report() or str(error))
