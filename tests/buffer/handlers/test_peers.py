"""Messages to peers that are gone."""

from collections.abc import AsyncIterator

import pytest
import structlog
import zmq.asyncio

from slipstream.buffer.handlers.peers import ReplySender
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.sockets import bind_router
from tests.conftest import free_port


@pytest.fixture
def gone() -> list[bytes]:
    return []


@pytest.fixture
async def send(gone: list[bytes], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ReplySender]:
    """Sends through a socket without peers; logs once."""
    monkeypatch.setattr("slipstream.buffer.handlers.peers.LOG_EVERY_S", 3600.0)
    context = zmq.asyncio.Context()
    yield ReplySender(bind_router(context, f"tcp://127.0.0.1:{free_port()}", max_message_bytes=1000), gone.append)
    context.destroy(linger=0)


async def test_only_named_lost_peers_are_logged(send: ReplySender, gone: list[bytes]) -> None:
    with structlog.testing.capture_logs() as logs:
        for peer in (b"\0k\x8bEh", b"rollout-1"):
            await send(peer, m.UnknownPeer())
    assert gone == [b"\0k\x8bEh", b"rollout-1"]
    assert [line["peer"] for line in logs] == ["rollout-1"]


async def test_unsent_replies_are_counted_and_logged_at_intervals(send: ReplySender) -> None:
    with structlog.testing.capture_logs() as logs:
        for _ in range(240):
            await send(b"rollout-1", m.UnknownPeer())
    assert send.unsent == 240
    assert [line["unsent"] for line in logs] == [1]
