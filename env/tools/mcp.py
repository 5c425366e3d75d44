"""Tools of MCP servers (Model Context Protocol), over stdio or HTTP.

The clients run in an event loop of their own, because a session's loop may change and theirs must outlive episodes.
"""

import asyncio
import atexit
import fcntl
import importlib.util
import os
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, TextIO, cast
from weakref import WeakSet

from slipstream.configs.runtime.errors import ConfigError, format_error
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.processes import guarded_command
from slipstream.configs.schema.base import expand_home
from slipstream.env.tools.pool import Pool
from slipstream.env.tools.schema import Tool, ToolError, ToolUnavailable, whole_schema

log = get_log("env.mcp")

CHECK_S: Final = 5.0
"""Deadline of a health check."""
STOP_S: Final = 10.0
"""Deadline of a server's end; the library kills it after two times 2 s."""
RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 60.0
"""After a failed start, calls fail without another attempt: for `RETRY_S`, twice as long after each further failure."""
STDERR_BYTES: Final = 16 << 20
"""Size at which the file of a server's stderr is emptied; it is compared every `STDERR_CHECK_S`."""
STDERR_CHECK_S: Final = 5.0
_STDERR_CHARACTERS: Final = 500


class ServerEnded(Exception):
    """The connection to a server ended during a call."""


class Mcp:
    """The tools of one MCP server.

    A server that ended or does not respond is restarted, and a call that failed for that is repeated once. Calls share
    a restart, which continues after their deadlines: later calls use it. The episode is lost if the server can't be
    restarted, or if it was the episode's own.

    Args:
        command: the server's program and arguments, for stdio. It ends with this process.
        url: of a server over HTTP, instead of `command`.
        environment: variables of the server's process, besides HOME, PATH and a few others.
        headers: of each HTTP request.
        tools: names of the tools to offer; unset: all.
        servers: 0: one server for all episodes. Otherwise each episode has a server of its own, for servers with a
            state: so many at once at most, other episodes wait.
        start_deadline_s: time for the server to start and list its tools.
        stderr: file to which its stderr is appended; unset: a temporary one. It is emptied at `STDERR_BYTES`.

    Raises: ConfigError when it can't be started, or lacks one of `tools`, or without the package mcp.
    """

    def __init__(
        self,
        command: Sequence[str] = (),
        url: str | None = None,
        environment: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        tools: Sequence[str] | None = None,
        servers: int = 0,
        start_deadline_s: float = 30.0,
        stderr: str | None = None,
    ) -> None:
        if bool(command) == (url is not None) or isinstance(command, str):
            raise ConfigError("tool mcp: give either command, a list of program and arguments, or url")
        if importlib.util.find_spec("mcp") is None:
            raise ConfigError('tool mcp needs mcp: pip install "slipstream[mcp]"')
        self.fingerprint = ""
        self.start_deadline_s = start_deadline_s
        self._command, self._environment = list(command), dict(environment or {})
        self._url, self._headers = url, dict(headers or {})
        self._stderr = None if stderr is None else expand_home(Path(stderr))
        self._shared: _Server | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._failures, self._failure, self._retry_at = 0, "", float("-inf")
        self._servers = WeakSet[_Server]()
        """All that run, start or end."""
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._pool: Pool[_Server] | None = None
        if servers:
            self._pool = Pool(
                self._started, is_healthy=_Server.is_healthy, stop=_Server.close, size=servers, reuse=False
            )
        self._thread = threading.Thread(target=self._run_loop, name="mcp", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self.tools = self._tools(self._submit(self._first()).result(), names=tools)
        except ToolUnavailable as error:
            self.close()
            raise ConfigError(str(error)) from error
        except BaseException:  # raised again, an interrupt while the server starts too: its process must not stay
            self.close()
            raise

    async def open(self, episode: AsyncExitStack) -> Sequence[Tool]:
        """The tools; with `servers` on a server that ends with the episode. Raises: ToolUnavailable."""
        if self._pool is None:
            return self.tools
        held = AsyncExitStack()
        episode.push_async_callback(lambda: self._in_loop(held.aclose()))  # first: the next line may be cancelled
        server = await self._in_loop(held.enter_async_context(self._pool.use()))

        def caller(name: str) -> Any:
            return lambda arguments: self._in_loop(self._call_own(server, name, arguments))

        return [Tool(tool.name, tool.schema, caller(tool.name)) for tool in self.tools]

    def close(self) -> None:
        """Ends the servers and the event loop; called at exit, too."""
        if self._loop.is_closed():
            return
        atexit.unregister(self.close)
        with suppress(TimeoutError):
            self._submit(self._close()).result(STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)

    async def _in_loop(self, work: Any) -> Any:
        """Runs a coroutine in the clients' loop; a cancellation of the caller cancels it.

        Raises: ToolUnavailable after `close`.
        """
        return await asyncio.wrap_future(self._submit(work))

    def _submit(self, work: Any) -> "Future[Any]":
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise self._closed_error() from None

    def _closed_error(self) -> ToolUnavailable:
        return ToolUnavailable(f"MCP server {self} is closed")

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_cancel_others())
        self._loop.close()

    async def _first(self) -> list[Any]:
        """The tools with their descriptions and schemas. Raises: ToolUnavailable."""
        if self._pool is None:
            return (await self._live()).tools
        async with self._pool.use() as server:
            return server.tools

    async def _close(self) -> None:
        self._closed = True
        await asyncio.gather(*(server.close() for server in self._servers))
        if self._pool is not None:
            await self._pool.close()

    def _tools(self, offered: Sequence[Any], *, names: Sequence[str] | None) -> list[Tool]:
        """Raises: ConfigError for a name that the server does not have."""
        by_name = {tool.name: tool for tool in offered}
        missing = [name for name in names or () if name not in by_name]
        if missing:
            raise ConfigError(f"tool mcp: {self} has no tool {', '.join(missing)}; it has {', '.join(by_name)}")
        chosen = [by_name[name] for name in names] if names is not None else list(offered)
        return [
            Tool(tool.name, whole_schema(tool.name, tool.description or "", tool.input_schema), self._caller(tool.name))
            for tool in chosen
        ]

    def _caller(self, name: str) -> Any:
        return lambda arguments: self._in_loop(self._call(name, arguments))

    async def _call_own(self, server: "_Server", name: str, arguments: Mapping[str, Any]) -> str:
        """Raises: ToolError, ToolUnavailable."""
        try:
            return await server.call(name, arguments)
        except ServerEnded:
            raise ToolUnavailable(f"MCP server {self} of this episode ended, with its state") from None

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Raises: ToolError, ToolUnavailable."""
        try:
            return await (await self._live()).call(name, arguments)
        except ServerEnded:
            log.warning("MCP server ended during a call", server=str(self), tool=name)
        try:
            return await (await self._live()).call(name, arguments)
        except ServerEnded:
            raise ToolError("the tool's server ended during this call, twice") from None

    async def _live(self) -> "_Server":
        """The shared server, restarted if it has ended. Raises: ToolUnavailable."""
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew())
        # Unlike a plain await this does not cancel the restart at the deadline of one of the calls that share it.
        await asyncio.wait([self._renewal])
        if self._shared is None:
            raise ToolUnavailable(self._failure)
        return self._shared

    async def _renew(self) -> None:
        """Replaces the shared server if it has ended or does not respond; without success there is none then."""
        if self._shared is not None:
            if await self._shared.is_healthy():
                return
            log.warning("MCP server is restarted", server=str(self))
            await self._shared.close()
            self._shared = None
        if time.monotonic() < self._retry_at:
            return
        try:
            self._shared = await self._started()
            self._failures = 0
        except ToolUnavailable as error:
            self._failure = str(error)
            self._retry_at = time.monotonic() + min(MAX_RETRY_S, RETRY_S * 2.0**self._failures)
            self._failures += 1

    async def _started(self) -> "_Server":
        """A new server. Raises: ToolUnavailable."""
        if self._closed:
            raise self._closed_error()
        server = _Server(self)
        self._servers.add(server)
        await server.start()
        return server

    @asynccontextmanager
    async def transport(self, stderr: TextIO) -> AsyncIterator[Any]:
        """A new connection, for the library's client; a server's process ends with this one, however that ends."""
        if self._url is not None:
            from mcp.client.streamable_http import streamable_http_client
            from mcp.shared._httpx_utils import create_mcp_http_client

            async with (
                create_mcp_http_client(headers=self._headers) as client,
                streamable_http_client(self._url, http_client=client) as streams,
            ):
                yield streams
        else:
            from mcp.client.stdio import StdioServerParameters, stdio_client

            program, *arguments = guarded_command(self._command, f"SLIPSTREAM_MCP={uuid.uuid4().hex}")
            parameters = StdioServerParameters(command=program, args=arguments, env=self._environment)
            async with stdio_client(parameters, errlog=stderr) as streams:
                yield streams

    def open_stderr(self) -> TextIO:
        """The file for the server's stderr. Raises: OSError."""
        if self._stderr is not None:
            return self._stderr.open("a+", errors="replace")
        return _appending(cast(TextIO, tempfile.TemporaryFile("w+", errors="replace")))

    def __str__(self) -> str:
        return self._url or " ".join(self._command)


class _Server:
    """One connection, with its server's process over stdio; in the clients' loop."""

    def __init__(self, settings: Mcp) -> None:
        self._settings = settings
        self._client: Any = None
        self._suspect = False
        self._reason = ""
        self._stop = asyncio.Event()
        self._ready = asyncio.Event()
        self.tools: list[Any] = []
        # The library's contexts must be entered and left in one task.
        self._task = asyncio.create_task(self._run())

    async def start(self) -> None:
        """Waits for the connection and the list of tools; ends the server if cancelled. Raises: ToolUnavailable."""
        ready = asyncio.ensure_future(self._ready.wait())
        try:
            await asyncio.wait(
                [self._task, ready], timeout=self._settings.start_deadline_s, return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            ready.cancel()
        if not self._ready.is_set():
            late = not self._task.done()
            await self.close()
            reason = f"not ready within {self._settings.start_deadline_s:g} s" if late else self._reason
            raise ToolUnavailable(f"MCP server {self._settings} can't be used: {reason}")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result's texts. Raises: ToolError for an error of the tool, ServerEnded."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        request = asyncio.ensure_future(self._client.call_tool(name, dict(arguments)))
        try:
            await asyncio.wait([request, self._task], return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                raise ServerEnded
            result = request.result()
        except MCPError as error:
            self._suspect = True
            if error.error.code == CONNECTION_CLOSED:
                raise ServerEnded from None
            raise ToolError(f"{error.error.message} ({error.error.code})") from None
        except asyncio.CancelledError:
            self._suspect = True  # late: is the tool slow, or does the server not respond at all?
            if request.cancelled():  # by the library, because the connection is gone
                raise ServerEnded from None
            raise
        finally:
            request.cancel()
        text = "\n".join(_as_text(part) for part in result.content)
        if result.is_error:
            raise ToolError(text)
        return text

    async def is_healthy(self) -> bool:
        """True if the connection stands; after a failed or late call, only if the server responds."""
        if self._task.done() or not self._suspect:
            return not self._task.done()
        with suppress(Exception):  # the library raises errors of many kinds when the connection is broken
            async with asyncio.timeout(CHECK_S):
                await self._client.list_tools(cache_mode="bypass")
                self._suspect = False
        return not self._suspect

    async def close(self) -> None:
        """Ends the connection, and over stdio the server."""
        if not self._stop.is_set() and not self._ready.is_set():
            # It waits for the server's answer. Once only: a second one would interrupt the server's end.
            self._task.cancel()
        self._stop.set()
        _, pending = await asyncio.wait([self._task], timeout=STOP_S)
        for task in pending:
            task.cancel()

    async def _run(self) -> None:
        """Keeps the connection until `close`, or until it breaks for the reason in `_reason`."""
        with self._settings.open_stderr() as stderr:
            begin = stderr.seek(0, os.SEEK_END)
            try:
                await self._connect(stderr)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  (the library raises groups of anything)
                size = os.fstat(stderr.fileno()).st_size
                stderr.seek(max(begin if begin <= size else 0, size - 4 * _STDERR_CHARACTERS))
                printed = stderr.read()[-_STDERR_CHARACTERS:].strip()
                self._reason = f"{format_error(_innermost(error))}; its stderr ends with {printed!r}"
                if self._ready.is_set() and not self._stop.is_set():
                    log.warning("connection to MCP server broken", server=str(self), reason=self._reason)

    async def _connect(self, stderr: TextIO) -> None:
        from mcp import Client

        async with Client(self._settings.transport(stderr)) as client:
            self._client = client
            page = await client.list_tools()
            self.tools += page.tools
            while page.next_cursor is not None:
                page = await client.list_tools(cursor=page.next_cursor)
                self.tools += page.tools
            self._ready.set()
            while not self._stop.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(STDERR_CHECK_S):
                        await self._stop.wait()
                if os.fstat(stderr.fileno()).st_size > STDERR_BYTES:
                    os.ftruncate(stderr.fileno(), 0)

    def __str__(self) -> str:
        return str(self._settings)


async def _cancel_others() -> None:
    """Cancels all other tasks of the event loop, and waits for their ends."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.wait(others)


def _appending(file: TextIO) -> TextIO:
    """The file with each write at its end: after it was emptied, at its beginning."""
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


def _as_text(part: Any) -> str:
    """A part of a result; pictures and sounds are named only."""
    text = getattr(part, "text", None)
    return text if isinstance(text, str) else f"[{getattr(part, 'type', type(part).__name__)}]"


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
