"""HTTP with an engine's server."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from slipstream.rollout_servers.engines.base import EngineError, RequestRefused
from slipstream.rollout_servers.engines.sglang.server import EngineClient, FailedAnswer
from tests.conftest import free_port
from tests.rollout_servers.engines.sglang.http_stub import serve

LONG_S = 60.0


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


async def test_post_sends_json(client: EngineClient) -> None:
    assert await client.post("/echo", {"token_ids": [1, 2]}, deadline_s=LONG_S) == b'{"token_ids":[1,2]}'


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
