"""HTTP client of SGLang's server on this host: JSON in, JSON out, a deadline for every call."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from slipstream.rollout_servers.engines.base import EngineError, RequestRefused

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
        # Loopback needs none, but without one httpx would read all certificates of this host for each call.
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    async def healthy(self, path: str, *, deadline_s: float) -> bool:
        """Whether the health endpoint answers with success."""
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

        Raises: RequestRefused, EngineError; the latter when the last event has not come after `deadline_s` too.
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
