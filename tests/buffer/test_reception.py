"""Messages wait for the service in the order of their arrival, and their groups have been looked at."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import zmq.asyncio

from slipstream.buffer.service import ReceivedMessage, Receiver
from slipstream.buffer.store.types import DeliveredGroup
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import FrameError, encode
from slipstream.buffer.wire.sockets import bind_router
from slipstream.configs import RunConfig
from slipstream.configs.runtime.threads import cancel_tasks
from tests.buffer.groups import train_group
from tests.buffer.peers import PATIENCE_S, Peer, connected


@contextlib.asynccontextmanager
async def receiving(config: RunConfig) -> AsyncIterator[Receiver]:
    context = zmq.asyncio.Context()
    try:
        reception = Receiver(config, bind_router(context, config.buffer.bind, max_message_bytes=1 << 20))
        task = asyncio.create_task(reception.run())
        yield reception
        await cancel_tasks(task)
    finally:
        context.destroy(linger=0)


@pytest.fixture
async def reception(config: RunConfig) -> AsyncIterator[Receiver]:
    async with receiving(config) as reception:
        yield reception


@pytest.fixture
async def peer(config: RunConfig, reception: Receiver) -> AsyncIterator[Peer]:
    async with connected(config) as peer:
        yield peer


async def arrived(reception: Receiver) -> ReceivedMessage:
    async with asyncio.timeout(PATIENCE_S):
        return await reception.next()


async def test_delivery_is_inspected(reception: Receiver, peer: Peer) -> None:
    frame = encode(train_group("1"))
    await peer.send(m.Deliver(ids=["1", "2"]), frame, b"nonsense")
    arrival = await arrived(reception)
    good, bad = arrival.groups
    assert (arrival.peer, good.id, bad.id) == (b"r0", "1", "2")
    assert isinstance(good.found, DeliveredGroup)
    assert good.found.blob == frame
    assert isinstance(bad.found, FrameError)


async def test_delivery_of_maximum_size(reception: Receiver, peer: Peer) -> None:
    ids = [str(number) for number in range(m.GROUPS_PER_DELIVERY)]
    await peer.send(m.Deliver(ids=ids), *[b"nonsense" for _ in ids])
    assert [group.id for group in (await arrived(reception)).groups] == ids


async def test_garbage_arrives_as_frame_error(reception: Receiver, peer: Peer) -> None:
    await peer.socket.send_multipart([b"nonsense"])
    assert isinstance((await arrived(reception)).message, FrameError)


async def test_delivery_with_wrong_count_is_frame_error(reception: Receiver, peer: Peer) -> None:
    await peer.send(m.Deliver(ids=["1", "2"]), encode(train_group("1")))
    assert "2 groups announced, 1 sent" in str((await arrived(reception)).message)


async def test_messages_keep_order_under_backpressure(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.buffer.service.MAX_QUEUED_MESSAGES", 2)
    async with receiving(config) as reception, connected(config) as peer:
        for request in range(50):
            await peer.send(m.StateRequest(request=request))
        assert [(await arrived(reception)).message.request for _ in range(50)] == list(range(50))
