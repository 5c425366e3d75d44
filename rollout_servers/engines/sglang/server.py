"""SGLang's server as a child process (Linux): HTTP client, start, health, crash detection, end of all its processes."""

import asyncio
import os
import signal
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import msgspec

from slipstream.configs.runtime import processes as guard
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.threads import run_in_thread
from slipstream.rollout_servers.engines.base import EngineError, RequestRefused
from slipstream.rollout_servers.engines.sglang.arguments import Command

log = get_log("rollout.engine")

_EVENT = b"data:"
_LAST_EVENT = "[DONE]"
_IS_JSON = {"content-type": "application/json"}


class FailedAnswer(EngineError):
    """The server answered with a failure; its health endpoint decides whether it still works."""


def failure(code: int, message: str) -> EngineError:
    """The error for an HTTP status: RequestRefused for 4xx, else FailedAnswer."""
    return RequestRefused(message) if 400 <= code < 500 else FailedAnswer(message)


class EngineClient:
    """Client of the server; safe to use from one event loop."""

    def __init__(self, name: str, url: str) -> None:
        """`name`: the server, in errors."""
        self.name = name
        self.url = url
        self._closed = False
        self._open: set[httpx.AsyncClient] = set()
        # Unused on loopback, but without it httpx would read all certificates of this host for each call.
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    async def healthy(self, path: str, *, deadline_s: float) -> bool:
        """True if the health endpoint answers with success."""
        try:
            async with self._connection(path, deadline_s) as http:
                return (await http.get(path)).is_success
        except EngineError:
            return False

    async def get(self, path: str, *, deadline_s: float) -> bytes:
        """The answer to a GET. Raises: RequestRefused, EngineError."""
        return await self._request("GET", path, None, deadline_s=deadline_s)

    async def post(self, path: str, body: Any = None, *, deadline_s: float) -> bytes:
        """The answer to a POST of `body` as JSON. Raises: RequestRefused, EngineError."""
        return await self._request("POST", path, body, deadline_s=deadline_s)

    async def stream(self, path: str, body: Any, take: Callable[[str], None], *, deadline_s: float) -> None:
        """Calls `take` with each server-sent event that answers a POST; cancelling closes the connection.

        Raises: RequestRefused, EngineError; the latter also when the last event is missing after `deadline_s`.
        """
        async with (
            self._connection(path, deadline_s) as http,
            http.stream("POST", path, content=_json(body), headers=_IS_JSON) as answer,
        ):
            if not answer.is_success:
                raise self._error(path, answer.status_code, await answer.aread())
            async for line in _lines(answer.aiter_bytes()):
                if not line.startswith(_EVENT):
                    continue
                event = line.removeprefix(_EVENT).strip().decode(errors="replace")
                if event == _LAST_EVENT:
                    return
                take(event)
        raise EngineError(f"{self.name} at {self.url}{path} broke off in the middle of an answer")

    async def close(self) -> None:
        """Closes all connections; later calls raise EngineError."""
        self._closed = True
        for http in list(self._open):
            await http.aclose()

    async def _request(self, method: str, path: str, body: Any, *, deadline_s: float) -> bytes:
        async with self._connection(path, deadline_s) as http:
            answer = await http.request(method, path, content=_json(body), headers=_IS_JSON)
        if not answer.is_success:
            raise self._error(path, answer.status_code, answer.content)
        return answer.content

    @asynccontextmanager
    async def _connection(self, path: str, deadline_s: float) -> AsyncIterator[httpx.AsyncClient]:
        """A connection of its own for one call.

        The server closes connections after an error or 5 idle seconds; a call that reuses one at that moment would look
        like a crash. Nor do calls share httpx's pool: it scans all its connections whenever one opens or closes, and
        thousands of streams would block the event loop for many seconds.
        """
        if self._closed:
            raise EngineError(f"{self.name} at {self.url}{path} is not called: its client is closed")
        http = httpx.AsyncClient(
            base_url=self.url,
            timeout=None,  # each call has a deadline of its own
            verify=self._tls,
            trust_env=False,  # a proxy can't reach this host's loopback
        )
        self._open.add(http)
        try:
            async with asyncio.timeout(deadline_s), http:
                yield http
        except TimeoutError:
            raise EngineError(f"{self.name} at {self.url}{path} did not answer within {deadline_s:g} s") from None
        except httpx.HTTPError as error:
            raise EngineError(f"no connection to {self.name} at {self.url}{path}: {_reason(error)!r}") from error
        finally:
            self._open.discard(http)

    def _error(self, path: str, status: int, content: bytes) -> EngineError:
        return failure(status, f"{self.name} answered {path} with {status}: {_message(content)}")


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Whole lines; httpx also splits at Unicode line separators, such as U+2028 in an event."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line


def _json(body: Any) -> bytes | None:
    return None if body is None else msgspec.json.encode(body)


def _reason(error: httpx.HTTPError) -> BaseException:
    """The operating system's error, if any: httpx may only report that all connection attempts failed."""
    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, OSError) and reason.errno is not None:
            return reason
        reason = reason.__cause__ or reason.__context__
    return error


def _message(content: bytes) -> str:
    """Error message of an answer: {"error": {"message": …}}, {"error": …}, {"detail": …}, or plain text."""
    try:
        answer = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return content.decode(errors="replace")
    reason = answer.get("error", answer.get("detail", answer)) if isinstance(answer, dict) else answer
    return str(reason.get("message", reason) if isinstance(reason, dict) else reason)


LAST_LINES = 20
GRACE_S = 10.0
"""Between SIGTERM and SIGKILL."""
REAP_S = 5.0
"""Time for the kernel to end a killed process."""
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

        Raises: EngineError with its last lines when it ends, or is not healthy within `deadline_s`; or when this host
        has no room for its console or for another process.
        """
        try:
            server = await cls._begin(command)
        except OSError as error:
            raise EngineError(f"{command.name} could not be started: {error}") from error
        try:
            async with asyncio.timeout(deadline_s):
                await server._until_healthy()
        except BaseException as reason:  # cancelled, too: the process must not stay
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
                *guard.guarded_command(command.arguments, marker),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                # Safe path: otherwise `-m` searches the working folder first.
                env={**os.environ, "PYTHONSAFEPATH": "1", **command.environment},
                start_new_session=True,  # Ctrl-C in the terminal must not reach it
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
        """True if the server reports itself healthy."""
        return await self.client.healthy(self._command.health, deadline_s=_HEALTH_DEADLINE_S)

    async def close(self) -> None:
        """Ends the server and all processes that it started."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        ended, _ = await asyncio.wait({self.ended}, timeout=GRACE_S)
        if not ended:
            log.warning("engine server ignored SIGTERM and is killed", engine=self._command.name, grace_s=GRACE_S)
        # The rest of its process tree, which its guard otherwise kills after this process.
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
        crash = self._crash or self._server.exit_report()
        if crash is not None:
            raise self.fail(crash)

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
