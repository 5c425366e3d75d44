"""An engine's server as a child process: started, watched, and ended with all that it started. Linux only."""

import asyncio
import os
import signal
import sys
import time
from collections import deque
from contextlib import suppress

from slipstream.configs import guard
from slipstream.configs.background import in_background
from slipstream.configs.logs import get_log
from slipstream.rollout_servers.engines.base import EngineError
from slipstream.rollout_servers.engines.http.client import EngineClient
from slipstream.rollout_servers.engines.http.command import Command

LAST_LINES = 20
GRACE_S = 10.0
"""Between SIGTERM and SIGKILL."""
REAP_S = 5.0
"""How long the kernel may take to end a process that is killed."""
_HEALTH_EVERY_S = 0.1
_HEALTH_DEADLINE_S = 5.0

log = get_log("rollout.engine")


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
        await in_background(guard.kill_members, [self.pid], self._marker)
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
