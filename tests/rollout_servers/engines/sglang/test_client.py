"""HTTP with an engine's server."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from slipstream.rollout_servers.engines.base import EngineError, RequestRefused
from slipstream.rollout_servers.engines.sglang.server import EngineClient, FailedAnswer
from tests.conftest import free_port
from tests.rollout_servers.engines.sglang.http_stub import serve

LONG_S = 60.0


@pytest_asyncio.fixture
async def client() -> AsyncIterator[EngineClient]:
    """A client of a stub that runs in threads of this process."""
    port = free_port()
    server = serve(port)
    client = EngineClient("the stub", f"http://127.0.0.1:{port}")
    yield client
    await client.close()
    server.shutdown()
    server.server_close()


async def test_what_is_posted_arrives_as_json(client: EngineClient) -> None:
    assert await client.post("/echo", {"token_ids": [1, 2]}, deadline_s=LONG_S) == b'{"token_ids":[1,2]}'


@pytest.mark.parametrize(
    ("path", "reason"), [("/refused", "400: the prompt is too long"), ("/unknown", "404: Not Found")]
)
async def test_a_client_error_is_a_refusal_with_the_reason(client: EngineClient, path: str, reason: str) -> None:
    with pytest.raises(RequestRefused, match=f"the stub answered {path} with {reason}"):
        await client.post(path, {}, deadline_s=LONG_S)
    with pytest.raises(RequestRefused, match=reason):
        await client.stream(path, {}, print, deadline_s=LONG_S)


@pytest.mark.parametrize(("path", "reason"), [("/failed", "500: the engine core is dead"), ("/garbled", "500: <html>")])
async def test_a_server_error_is_a_failure_with_the_reason(client: EngineClient, path: str, reason: str) -> None:
    with pytest.raises(FailedAnswer, match=reason):
        await client.post(path, {}, deadline_s=LONG_S)


async def test_a_connection_that_is_closed_after_an_error_is_not_taken_for_the_death_of_the_server(
    client: EngineClient,
) -> None:
    with pytest.raises(FailedAnswer):
        await client.post("/failed", {}, deadline_s=LONG_S)
    assert await client.healthy("/health", deadline_s=LONG_S)


async def test_an_answer_that_does_not_come_is_an_error_that_names_the_deadline(client: EngineClient) -> None:
    with pytest.raises(EngineError, match=r"the stub at .*/hangs did not answer within 0\.1 s"):
        await client.post("/hangs", {}, deadline_s=0.1)


async def test_a_connection_that_breaks_is_an_error(client: EngineClient) -> None:
    with pytest.raises(EngineError, match=r"no connection to the stub at .*/hangs-up"):
        await client.post("/hangs-up", {}, deadline_s=LONG_S)


async def test_a_process_without_free_file_descriptors_is_told_so(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_socket(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", no_socket)
    with pytest.raises(EngineError, match=r"no connection to the stub .*Too many open files"):
        await client.post("/echo", {}, deadline_s=LONG_S)


async def test_nobody_there_is_an_error_and_not_healthy() -> None:
    client = EngineClient("nobody", f"http://127.0.0.1:{free_port()}")
    assert not await client.healthy("/health", deadline_s=LONG_S)
    with pytest.raises(EngineError, match="no connection to nobody"):
        await client.get("/metrics", deadline_s=LONG_S)
    await client.close()


async def test_a_closed_client_says_so(client: EngineClient) -> None:
    await client.close()
    for call in (
        client.get("/environment", deadline_s=LONG_S),
        client.post("/echo", {}, deadline_s=LONG_S),
        client.stream("/events", [], print, deadline_s=LONG_S),
    ):
        with pytest.raises(EngineError, match="the stub at http:"):
            await call
    assert not await client.healthy("/health", deadline_s=LONG_S)


async def test_who_waits_for_an_answer_while_the_client_is_closed_hears_of_it(client: EngineClient) -> None:
    asking = asyncio.ensure_future(client.post("/hangs", {}, deadline_s=LONG_S))
    await client.post("/echo", {}, deadline_s=LONG_S)
    await client.close()
    with pytest.raises(EngineError, match="the stub at"):
        await asking


async def test_a_stream_gives_its_events_in_their_order(client: EngineClient) -> None:
    events: list[str] = []
    await client.stream("/events", ["1", "2", "3"], events.append, deadline_s=LONG_S)
    assert events == ["1", "2", "3"]


async def test_an_event_may_hold_what_unicode_takes_for_the_end_of_a_line(client: EngineClient) -> None:
    events: list[str] = []
    await client.stream("/events", ["a\u2028b\u0085c\x0bd\re"], events.append, deadline_s=LONG_S)
    assert events == ["a\u2028b\u0085c\x0bd\re"]


async def test_a_stream_that_ends_without_its_last_event_is_an_error_and_what_came_is_kept(
    client: EngineClient,
) -> None:
    events: list[str] = []
    with pytest.raises(EngineError, match="broke off in the middle"):
        await client.stream("/events-cut", ["1"], events.append, deadline_s=LONG_S)
    assert events == ["1"]


async def test_a_proxy_is_not_asked_for_what_is_on_loopback(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    asking = EngineClient("the stub", client.url)
    assert await asking.healthy("/health", deadline_s=LONG_S)
    await asking.close()


async def test_many_requests_are_under_way_at_once(client: EngineClient) -> None:
    hanging = [asyncio.create_task(client.post("/hangs", {}, deadline_s=LONG_S)) for _ in range(120)]
    assert await client.post("/echo", {}, deadline_s=LONG_S) == b"{}"
    for each in hanging:
        each.cancel()
    await asyncio.wait(hanging)
