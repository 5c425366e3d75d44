"""A running rollout server, and a buffer that a test drives by hand."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import zmq.asyncio

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import decode, decode_group, encode
from slipstream.buffer.wire.sockets import bind_router
from slipstream.configs import RunConfig
from slipstream.rollout_servers.engines.base import Completion, Request
from slipstream.rollout_servers.server import RolloutServer
from tests.rollout_servers.scripted import ScriptedEngine, completion

DEADLINE_S = 60.0
NEVER_S = 1000.0
DONE = completion([3, 4])
CUT = completion([3], finish_reason="abort")


@dataclass
class GatedEngine(ScriptedEngine):
    """Answers while its gate is open; counts the requests."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    requests: int = 0
    greedy_answers: list[Completion] = field(default_factory=list)

    async def generate(self, request: Request) -> list[Completion]:
        self.requests += 1
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return self.greedy_answers if request.greedy and self.greedy_answers else self.answers


@dataclass
class FakeBuffer:
    """The buffer's socket."""

    socket: zmq.asyncio.Socket

    async def send(self, *messages: m.Message) -> None:
        for message in messages:
            await self.socket.send_multipart([b"server-1", encode(message)])

    async def grant(self, *tickets: m.Ticket) -> None:
        await self.send(m.Tickets(tickets=list(tickets)))

    async def acknowledge(self, **outcomes: str) -> None:
        await self.send(m.Acknowledge(outcomes=outcomes))

    async def receive(self, kind: type, met: Callable[[Any], bool] = lambda message: True) -> Any:
        """The next message of a kind that meets a condition; `Deliver` comes as a pair with its groups."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                message, groups = await self.next()
                if isinstance(message, kind) and met(message):
                    return (message, groups) if kind is m.Deliver else message

    async def until_held(self, *tickets: str) -> m.Credits:
        """The next heartbeat in which the server holds exactly these tickets."""
        credits: m.Credits = await self.receive(m.Credits, lambda credits: credits.held == list(tickets))
        return credits

    async def next(self) -> tuple[Any, list[m.Group]]:
        async with asyncio.timeout(DEADLINE_S):
            _, first, *blobs = await self.socket.recv_multipart()
        return decode(first, m.ToService), [decode_group(blob) for blob in blobs]

    async def welcome(self) -> m.ServerHello:
        hello: m.ServerHello = await self.receive(m.ServerHello)
        await self.send(m.Welcome(version=0))
        return hello


@dataclass
class RunningServer:
    """A server, its engine, and the event that lets a crashed engine start again."""

    config: RunConfig
    server: RolloutServer
    task: "asyncio.Task[None]"
    engine: GatedEngine
    may_restart: asyncio.Event

    @asynccontextmanager
    async def buffer(self, *, welcome: bool = True) -> AsyncIterator[FakeBuffer]:
        """A buffer that listens, and welcomes the server first."""
        context = zmq.asyncio.Context()
        try:
            buffer = FakeBuffer(bind_router(context, self.config.buffer.bind, max_message_bytes=1 << 24))
            if welcome:
                await buffer.welcome()
            yield buffer
        finally:
            context.destroy(linger=0)


StartServer = Callable[..., RunningServer]


def ticket(name: str, *, kind: str = m.TRAIN, greedy: bool = False) -> m.Ticket:
    return m.Ticket(id=name, kind=kind, epoch=0, indices=[0], samples=4, version=0, greedy=greedy)


def eval_ticket(name: str, *, indices: tuple[int, ...] = (0,), version: int = 0) -> m.Ticket:
    return m.Ticket(id=name, kind=m.EVAL, epoch=0, indices=list(indices), samples=1, version=version)
