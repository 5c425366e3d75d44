"""Bad networks between rollout servers, learner and buffer: one of bytes (TCP), one of messages (ZeroMQ)."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from slipstream.buffer.wire.sockets import bind_router, connect_dealer

CHUNK_BYTES = 1 << 16
MAX_MESSAGE_BYTES = 1 << 24


@dataclass
class TcpProxy:
    """Passes bytes on, late, slowly, or not at all for a while; cuts connections."""

    delay_s: float = 0.0
    """Before each chunk is passed on."""
    bytes_per_s: float = math.inf
    """Of each connection, in each direction."""
    passed_bytes: int = 0
    """So far."""
    connections: int = 0
    """So far."""
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _passing: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def running(self, *, listen: int, to: int) -> AsyncIterator[None]:
        """Between two loopback ports."""
        self._passing.set()
        async with asyncio.TaskGroup() as tasks:

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                self.connections += 1
                with suppress(ConnectionError):  # nobody there yet: the client tries again
                    far_reader, far_writer = await asyncio.open_connection("127.0.0.1", to)
                    self._open |= {writer, far_writer}
                    tasks.create_task(self._pass_on(reader, far_writer))
                    await self._pass_on(far_reader, writer)
                self._close(writer)

            server = await asyncio.start_server(serve, "127.0.0.1", listen)
            try:
                yield
            finally:
                server.close()
                self.end_black_hole()
                self.cut()

    def cut(self) -> None:
        """Ends every connection, and what is under way on it."""
        for writer in list(self._open):
            self._close(writer)

    def begin_black_hole(self) -> None:
        """Nothing gets through any more, and nobody is told."""
        self._passing.clear()

    def end_black_hole(self) -> None:
        """What was sent meanwhile gets through."""
        self._passing.set()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while chunk := await reader.read(CHUNK_BYTES):
                await asyncio.sleep(self.delay_s + len(chunk) / self.bytes_per_s)
                await self._passing.wait()
                writer.write(chunk)
                self.passed_bytes += len(chunk)
                await writer.drain()
        self._close(writer)

    def _close(self, writer: asyncio.StreamWriter) -> None:
        self._open.discard(writer)
        if not writer.is_closing():
            writer.transport.abort()


@dataclass
class MessageProxy:
    """A relay that speaks to the service as each of its peers would, and now and then drops, repeats or cuts."""

    rng: random.Random
    drop: float
    repeat: float
    """A second time, up to `late_s` later, so after what was sent since."""
    truncate: float
    late_s: float
    faults: Counter[str] = field(default_factory=Counter)
    _peers: dict[bytes, zmq.asyncio.Socket] = field(default_factory=dict)
    _running: set["asyncio.Task[None]"] = field(default_factory=set)

    @asynccontextmanager
    async def running(self, *, listen: str, to: str) -> AsyncIterator[None]:
        """Between two ZeroMQ addresses."""
        context = zmq.asyncio.Context()
        try:
            front = bind_router(context, listen, max_message_bytes=MAX_MESSAGE_BYTES)
            async with asyncio.TaskGroup() as tasks:
                self._start(tasks, self._from_peers(tasks, context, front, to))
                try:
                    yield
                finally:
                    for task in list(self._running):
                        task.cancel()
        finally:
            context.destroy(linger=0)

    def _start(self, tasks: asyncio.TaskGroup, work: Coroutine[None, None, None]) -> None:
        task = tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _from_peers(
        self, tasks: asyncio.TaskGroup, context: zmq.asyncio.Context, front: zmq.asyncio.Socket, to: str
    ) -> None:
        while True:
            peer, *frames = await front.recv_multipart()
            if peer not in self._peers:
                self._peers[peer] = connect_dealer(context, to, identity=peer.decode())
                self._start(tasks, self._to_peer(tasks, peer, front))
            await self._pass_on(tasks, self._peers[peer], [], frames)

    async def _to_peer(self, tasks: asyncio.TaskGroup, peer: bytes, front: zmq.asyncio.Socket) -> None:
        while True:
            await self._pass_on(tasks, front, [peer], await self._peers[peer].recv_multipart())

    async def _pass_on(
        self, tasks: asyncio.TaskGroup, socket: zmq.asyncio.Socket, address: list[bytes], frames: list[bytes]
    ) -> None:
        fate = self.rng.random()
        if fate < self.drop:
            self.faults["dropped"] += 1
            return
        if fate < self.drop + self.truncate:
            self.faults["truncated"] += 1
            cut = self.rng.randrange(len(frames))
            frames = [*frames[:cut], frames[cut][: self.rng.randrange(len(frames[cut]) + 1)], *frames[cut + 1 :]]
        elif fate < self.drop + self.truncate + self.repeat:
            self.faults["repeated"] += 1
            self._start(tasks, self._send_late(socket, [*address, *frames], self.rng.uniform(0, self.late_s)))
        await self._send(socket, [*address, *frames])

    async def _send_late(self, socket: zmq.asyncio.Socket, message: list[bytes], delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await self._send(socket, message)

    async def _send(self, socket: zmq.asyncio.Socket, message: list[bytes]) -> None:
        try:
            await socket.send_multipart(message)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # a peer that is gone
                raise
