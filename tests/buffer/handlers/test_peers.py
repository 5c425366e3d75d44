"""Messages to peers that are gone."""

from collections.abc import AsyncIterator

import pytest
import structlog
import zmq.asyncio

from slipstream.buffer.handlers.peers import Send, sender
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.sockets import bind_router
from tests.conftest import free_port


@pytest.fixture
def gone() -> list[bytes]:
    return []


@pytest.fixture
async def send(gone: list[bytes]) -> AsyncIterator[Send]:
    """Sends through a socket without peers."""
    context = zmq.asyncio.Context()
    yield sender(bind_router(context, f"tcp://127.0.0.1:{free_port()}", max_message_bytes=1000), gone.append)
    context.destroy(linger=0)


async def test_only_named_lost_peers_are_logged(send: Send, gone: list[bytes]) -> None:
    with structlog.testing.capture_logs() as logs:
        for peer in (b"rollout-1", b"\0k\x8bEh"):
            await send(peer, m.UnknownPeer())
    assert gone == [b"rollout-1", b"\0k\x8bEh"]
    assert [line["peer"] for line in logs] == ["rollout-1"]
