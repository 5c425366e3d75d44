"""A rollout server that runs, and a buffer at the other end of the line that is driven by hand."""

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
from slipstream.rollout_servers.engines.base import Completion
from slipstream.rollout_servers.server import RolloutServer
from tests.rollout_servers.scripted import ScriptedEngine, completion

DEADLINE_S = 60.0
NEVER_S = 1000.0
DONE = completion([3, 4])
CUT = completion([3], finish_reason="abort")


@dataclass
class PatientEngine(ScriptedEngine):
    """Answers only when it is let; counts the questions."""

    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    questions: int = 0
    greedy_answers: list[Completion] = field(default_factory=list)

    async def generate(
        self,
        prompt_ids: object,
        *,
        samples: int,
        greedy: bool,
        deadline_s: float,
        max_tokens: int | None = None,
    ) -> list[Completion]:
        self.questions += 1
        await self.may_answer.wait()
        if self.failure is not None:
            raise self.failure
        return self.greedy_answers if greedy and self.greedy_answers else self.answers


@dataclass
class Buffer:
    """The buffer's end of the line."""

    socket: zmq.asyncio.Socket

    async def says(self, *messages: m.Message) -> None:
        for message in messages:
            await self.socket.send_multipart([b"server-1", encode(message)])

    async def hears(self, kind: type, met: Callable[[Any], bool] = lambda message: True) -> Any:
        """The next message of a kind that is as wanted; groups come with `Deliver`, as a pair."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                message, groups = await self.next()
                if isinstance(message, kind) and met(message):
                    return (message, groups) if kind is m.Deliver else message

    async def next(self) -> tuple[Any, list[m.Group]]:
        async with asyncio.timeout(DEADLINE_S):
            _, first, *blobs = await self.socket.recv_multipart()
        return decode(first, m.ToService), [decode_group(blob) for blob in blobs]

    async def welcomes(self) -> m.ServerHello:
        hello: m.ServerHello = await self.hears(m.ServerHello)
        await self.says(m.Welcome(version=0))
        return hello


@dataclass
class Line:
    """A server that runs, its engine, and the means to answer it."""

    config: RunConfig
    server: RolloutServer
    running: "asyncio.Task[None]"
    engine: PatientEngine
    may_restart: asyncio.Event

    @asynccontextmanager
    async def buffer(self) -> AsyncIterator[Buffer]:
        """A buffer that listens until it is cut off."""
        context = zmq.asyncio.Context()
        try:
            yield Buffer(bind_router(context, self.config.buffer.bind, max_message_bytes=1 << 24))
        finally:
            context.destroy(linger=0)


MakeLine = Callable[..., Line]


def ticket(name: str, *, kind: str = m.TRAIN, greedy: bool = False) -> m.Ticket:
    return m.Ticket(id=name, kind=kind, epoch=0, indices=[0], samples=4, version=0, greedy=greedy)
