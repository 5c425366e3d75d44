"""A buffer service and its peers over real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import zmq
import zmq.asyncio
from redis.asyncio import Redis

from slipstream.buffer.client import BufferClient
from slipstream.buffer.service import BufferService
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import Outage
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import SchemaVersionError, decode, encode
from slipstream.buffer.wire.sockets import MAX_MESSAGE_BYTES, bind_router, connect_dealer
from slipstream.configs import RunConfig
from tests.buffer.ledger import ENV

PATIENCE_S = 60.0  # far above any duration here: only a hang fails the test
Some = TypeVar("Some", bound=m.Message)


@contextlib.asynccontextmanager
async def serving(config: RunConfig, *, queue_messages: int | None = None) -> AsyncIterator[BufferService]:
    """A service on `buffer.bind`; its exceptions are raised at exit.

    Args:
        queue_messages: size of the queue to a peer.
    """
    context = zmq.asyncio.Context()
    redis = Redis.from_url(config.redis.address, socket_timeout=10.0)
    try:
        if queue_messages is None:
            socket = bind_router(context, config.buffer.bind, max_message_bytes=MAX_MESSAGE_BYTES)
        else:
            socket = context.socket(zmq.ROUTER)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.SNDHWM, queue_messages)
            socket.setsockopt(zmq.SNDBUF, 1)  # the shortest kernel queue
            socket.bind(config.buffer.bind)
        service = BufferService(config, Ledger(redis, config), socket, Outage(config.redis))
        task = asyncio.create_task(service.run())
        try:
            yield service
        finally:
            while not task.done():
                task.cancel()  # again: Python 3.11's wait_for, inside redis-py, may swallow a cancellation
                await asyncio.wait([task], timeout=0.1)
            with contextlib.suppress(asyncio.CancelledError):
                await task
    finally:
        context.destroy(linger=0)
        await redis.aclose()


@contextlib.asynccontextmanager
async def connected(config: RunConfig, identity: str | bytes = "r0") -> AsyncIterator["Peer"]:
    """A rollout server's connection to the service."""
    context = zmq.asyncio.Context()
    try:
        if isinstance(identity, bytes):
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, identity)
            socket.connect(config.buffer.endpoint)
        else:
            socket = connect_dealer(context, config.buffer.endpoint, identity=identity)
        yield Peer(config, str(identity), socket)
    finally:
        context.destroy(linger=0)


@contextlib.asynccontextmanager
async def learner(config: RunConfig) -> AsyncIterator[BufferClient]:
    """The learner's client; its calls block, so call them with `asyncio.to_thread`."""
    client = BufferClient(config, "learner")
    try:
        yield client
    finally:
        client.close()


class Peer:
    """A connection to the service."""

    def __init__(self, config: RunConfig, name: str, socket: zmq.asyncio.Socket) -> None:
        self._config = config
        self._name = name
        self.socket = socket

    async def send(self, message: m.Message, *blobs: bytes) -> None:
        await self.socket.send_multipart([encode(message), *blobs])

    async def receive(self, kind: type[Some], *, among: Any = m.ToServer) -> Some:
        """The next message of this release, which must be of this kind."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with suppress(SchemaVersionError):  # the refusal of a frame with another version
                    message = decode(await self.socket.recv(), among)
                    break
        assert isinstance(message, kind), message
        return message

    async def state(self) -> m.State:
        """The state after the service has handled every earlier message."""
        await self.send(m.StateRequest(request=1))
        return await self.receive(m.State, among=m.ToLearner)

    async def lead(self, *, incarnation: str = "a1", step: int = 0) -> None:
        """Sends the hello of the run's learner."""
        hello = m.LearnerHello(request=1, incarnation=incarnation, run=self._config.run.name, step=step)
        await self.send(hello)
        await self.receive(m.State, among=m.ToLearner)

    async def hello(self, **differences: Any) -> None:
        """Sends the hello of a rollout server."""
        fitting: dict[str, Any] = {
            "run": self._config.run.name, "env": "digits", "env_fingerprint": "e1", "train_tasks": 10,
            "eval_tasks": 100, "tokenizer_fingerprint": "t1", "vocab_size": 32, "incarnation": "i1",
            "model_fingerprint": "m1",
        }  # fmt: skip
        await self.send(m.ServerHello(**(fitting | differences)))

    async def join(self, *, credits: int = 0, version: int = 0) -> None:
        await self.hello()
        await self.receive(m.Welcome)
        await self.credits(credits, version=version)

    async def credits(self, capacity: int, *, version: int = 0, held: Sequence[str] = ()) -> None:
        status = m.ServerStatus(server=self._name, version=version)
        await self.send(m.Credits(capacity=capacity, status=status, held=list(held)))

    async def tickets(self) -> list[m.Ticket]:
        return (await self.receive(m.Tickets)).tickets

    async def eval_tickets(self) -> list[m.Ticket]:
        """The next evaluation tickets; train tickets before them are skipped."""
        while (tickets := await self.tickets())[0].kind != m.EVAL:
            pass
        return tickets

    async def deliver(self, *groups: m.Group) -> dict[str, str]:
        """Sends groups; the outcomes that the service acknowledges."""
        await self.send(announced(*groups), *(encode(group) for group in groups))
        return (await self.receive(m.Acknowledge)).outcomes


def announced(*groups: m.Group) -> m.Deliver:
    """The announcement of these groups, with their tokens."""
    sampled: m.Sampled = {}
    for group in groups:
        actions = sum(trajectory.action_mask.count(1) for trajectory in group.trajectories)
        tokens = actions + sum(map(sum, group.lost.values())) + sum(group.unused.values())
        sampled.setdefault("" if group.kind == m.EVAL else ENV, {})[group.id] = tokens
    return m.Deliver(ids=[group.id for group in groups], sampled=sampled)


async def reissued(service: BufferService, count: int) -> bool:
    """Whether that many tickets were reissued."""
    return (await service.ledger.counts()).reissued == count


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Returns once the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.01)
