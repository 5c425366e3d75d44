"""An engine's server as a child process: started, watched, and ended with all that it started. Linux only."""

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
from slipstream.rollout_servers.engines.http.client import EngineClient
from slipstream.rollout_servers.engines.http.requests import FailedAnswer

log = get_log("rollout.engine")


@dataclass(frozen=True)
class Command:
    """How a server is started.

    Attributes:
        name: stands for it in errors.
        arguments: the command line, without a shell.
        environment: what is added to this process's own.
        port: where it will listen, on loopback.
        health: the path that answers with success once it is ready.
        console: the file that all it prints is appended to.
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


def command_line_flags(arguments: Mapping[str, Any], *, negatable: bool) -> list[str]:
    """`{"tensor_parallel_size": 2}` as `--tensor-parallel-size 2`.

    A mapping is JSON, and a sequence several words. True is the flag alone, and None leaves it out. So does False,
    unless flags are `negatable`: then it is `--no-flag`.
    """
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is False and negatable:
            flags.append(f"--no-{flag}")
        elif value is not None and value is not False:
            flags += [f"--{flag}", *_words(value)]
    return flags


def free_port() -> int:
    """A random port of loopback without a listener: another server's health must not be taken for this one's.

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
        client: speaks with it.
        ended: done once its process has ended, with how it ended in words.
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
                # Safe path: otherwise `-m` looks for modules in the working folder first.
                env={**os.environ, "PYTHONSAFEPATH": "1", **command.environment},
                start_new_session=True,  # Ctrl-C in the terminal is not meant for it
            )
        return cls(command, process, marker, console_start=console_start)

    @property
    def pid(self) -> int:
        """The server's process, the leader of the group of all that it starts."""
        return self._process.pid

    def obituary(self) -> str | None:
        """How it ended, with the last lines that it printed; None while it runs."""
        return f"{self.ended.result()}; {self.last_lines()}" if self.ended.done() else None

    def last_lines(self) -> str:
        """The last lines that it printed, for an error; without those that are indented, the frames of tracebacks."""
        with self._command.console.open("rb") as lines:
            lines.seek(self._console_start)
            told = (line.decode(errors="replace").rstrip() for line in lines if line.strip() and not line[:1].isspace())
            last = deque(told, maxlen=LAST_LINES)
        return "\n  ".join([f"the last lines of {self._command.console}:", *last])

    async def healthy(self) -> bool:
        """Whether the server itself says that it is."""
        return await self.client.healthy(self._command.health, deadline_s=_HEALTH_DEADLINE_S)

    async def close(self) -> None:
        """Ends the server and all that it started."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        ended, _ = await asyncio.wait({self.ended}, timeout=GRACE_S)
        if not ended:
            log.warning("engine server does not stop and is killed", engine=self._command.name, grace_s=GRACE_S)
        # Whatever of it is left, as its guard does when nobody closes it.
        await run_in_thread(guard.kill_members, [self.pid], self._marker)
        await asyncio.wait({self.ended}, timeout=REAP_S)
        await self.client.close()  # last: whoever still waits hears of the server's end

    async def _until_healthy(self) -> None:
        while not await self.healthy():
            if (obituary := self.obituary()) is not None:
                raise EngineError(obituary)
            await asyncio.wait({self.ended}, timeout=_HEALTH_EVERY_S)

    async def _watch(self) -> str:
        code = await self._process.wait()
        ending = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return f"{self._command.name} (process {self.pid}) ended with {ending}"


CALL_DEADLINE_S = 60.0
"""How long a call may take at least."""
_DEATH_S = 5.0
"""How long after its connections a server's process may end."""


class Calls:
    """What a server is asked until it is found dead, by one call or by its owner; then all who wait hear of it.

    Attributes:
        deadline_s: how long a call may take; then the server counts as dead.
    """

    def __init__(self, server: ServerProcess, *, update_deadline_s: float) -> None:
        """A call may take as long as an update: it may be a part of one, or have to wait for its end."""
        self.deadline_s = max(CALL_DEADLINE_S, update_deadline_s)
        self._server = server
        self._waiting: set[asyncio.Timeout] = set()
        self._death: str | None = None

    async def get(self, path: str) -> bytes:
        """The answer to a GET. Raises: RequestRefused, EngineError."""
        async with self.judged():
            return await self._server.client.get(path, deadline_s=self.deadline_s)

    async def post(self, path: str, body: Any = None) -> bytes:
        """The answer to a POST of `body` as JSON. Raises: RequestRefused, EngineError."""
        async with self.judged():
            return await self._server.client.post(path, body, deadline_s=self.deadline_s)

    @asynccontextmanager
    async def judged(self) -> AsyncIterator[None]:
        """Judges calls of the client that are made inside; ends them when the server is found dead elsewhere.

        Raises: RequestRefused when a healthy server refuses or fails this one request, EngineError when it is dead.
        """
        try:
            async with self.until_death():
                yield
        except RequestRefused:
            raise
        except EngineError as error:
            raise await self._verdict(error) from error

    @asynccontextmanager
    async def until_death(self) -> AsyncIterator[None]:
        """Ends what is awaited inside when the server is found dead elsewhere. Raises: EngineError."""
        self.check_alive()
        try:
            async with asyncio.timeout(None) as waiting:
                self._waiting.add(waiting)
                yield
        except TimeoutError:
            assert waiting.expired(), "nothing inside lets a deadline of its own pass as that"
            raise EngineError(str(self._death)) from None
        finally:
            self._waiting.discard(waiting)

    def check_alive(self) -> None:
        """Raises: EngineError when the server is dead."""
        death = self._death or self._server.obituary()
        if death is not None:
            raise self.die(death)

    def die(self, reason: str) -> EngineError:
        """Declares the server dead, and tells all who wait; the first reason counts. The error is the caller's."""
        self._death = self._death or reason
        told, self._waiting = self._waiting, set()
        for waiting in told:
            waiting.reschedule(asyncio.get_running_loop().time())
        return EngineError(self._death)

    async def _verdict(self, error: EngineError) -> EngineError:
        if self._death is None:
            if isinstance(error, FailedAnswer):
                if await self._server.healthy():
                    return RequestRefused(str(error))
            else:
                await asyncio.wait({self._server.ended}, timeout=_DEATH_S)
        return self.die(self._server.obituary() or str(error))
