"""The receiver: messages arrive in order, and their groups are inspected."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import zmq.asyncio

from slipstream.buffer.handlers.inspection import Inspector
from slipstream.buffer.service import MessageReceiver, ReceivedMessage
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.sockets import bind_router
from slipstream.configs import RunConfig
from slipstream.configs.runtime.threads import cancel_tasks
from tests.buffer.peers import PATIENCE_S, Peer, connected


@contextlib.asynccontextmanager
async def receiving(config: RunConfig) -> AsyncIterator[MessageReceiver]:
    context = zmq.asyncio.Context()
    try:
        receiver = MessageReceiver(
            Inspector(config), bind_router(context, config.buffer.bind, max_message_bytes=1 << 20)
        )
        task = asyncio.create_task(receiver.run())
        yield receiver
        await cancel_tasks(task)
    finally:
        context.destroy(linger=0)


@pytest.fixture
async def receiver(config: RunConfig) -> AsyncIterator[MessageReceiver]:
    async with receiving(config) as receiver:
        yield receiver


@pytest.fixture
async def peer(config: RunConfig, receiver: MessageReceiver) -> AsyncIterator[Peer]:
    async with connected(config) as peer:
        yield peer


async def arrived(receiver: MessageReceiver) -> ReceivedMessage:
    async with asyncio.timeout(PATIENCE_S):
        return await receiver.next()


async def test_delivery_of_maximum_size(receiver: MessageReceiver, peer: Peer) -> None:
    ids = [str(number) for number in range(m.GROUPS_PER_DELIVERY)]
    await peer.send(m.Deliver(ids=ids), *[b"nonsense" for _ in ids])
    assert [group.id for group in (await arrived(receiver)).groups] == ids


async def test_messages_keep_order_under_backpressure(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.buffer.service.MAX_QUEUED_MESSAGES", 2)
    async with receiving(config) as receiver, connected(config) as peer:
        for request in range(50):
            await peer.send(m.StateRequest(request=request))
        assert [(await arrived(receiver)).message.request for _ in range(50)] == list(range(50))
