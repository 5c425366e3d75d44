"""What arrives at the service: received, decoded and looked at, while Redis is busy with what came before it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq.asyncio

from slipstream.buffer.handlers.ingest import Looked, look_at
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import FrameError, decode
from slipstream.configs import RunConfig
from slipstream.configs.runtime.logging import LogInterval, get_log

log = get_log("buffer.reception")

MOST_WAITING = 128
"""Messages that are looked at before their time has come; further ones wait in the socket."""
CONTROL_BYTES = 4 << 20
FRAMES_PER_MESSAGE = 1 + m.GROUPS_PER_DELIVERY
SAY_EVERY_S = 1.0


@dataclass(frozen=True)
class Arrival:
    """What a peer has sent."""

    peer: bytes
    message: Any
    """Of `ToService`, or the FrameError that says why it is none."""
    groups: Sequence[Looked] = ()
    """What came with a delivery."""


class Reception:
    """The service's incoming messages, in the order of their arrival."""

    def __init__(self, config: RunConfig, socket: zmq.asyncio.Socket) -> None:
        self._config = config
        self._socket = socket
        self._arrivals: asyncio.Queue[Arrival] = asyncio.Queue(MOST_WAITING)

    async def run(self) -> None:
        """Receives until cancelled."""
        while True:
            # Not copied: a group's bytes go from ZeroMQ's memory into Redis's socket.
            peer, *frames = await self._socket.recv_multipart(copy=False)
            await self._arrivals.put(self._read(peer.bytes, [frame.buffer for frame in frames]))
            await asyncio.sleep(0)  # neither call waits while there is something: the service must have its turn

    async def next(self) -> Arrival:
        """The next message."""
        return await self._arrivals.get()

    def _read(self, peer: bytes, frames: Sequence[memoryview]) -> Arrival:
        try:
            if not 0 < len(frames) <= FRAMES_PER_MESSAGE or len(frames[0]) > CONTROL_BYTES:
                raise FrameError(f"{len(frames)} frames, or one of control of more than {CONTROL_BYTES} bytes")
            message = decode(frames[0], m.ToService)
            return Arrival(peer, message, self._look_at(message, frames[1:]) if isinstance(message, m.Deliver) else ())
        except FrameError as error:
            return Arrival(peer, error)

    def _look_at(self, delivery: m.Deliver, blobs: Sequence[memoryview]) -> Sequence[Looked]:
        if len(blobs) != len(delivery.ids):
            raise FrameError(f"{len(delivery.ids)} groups announced, {len(blobs)} sent")
        return [look_at(group_id, blob, self._config) for group_id, blob in zip(delivery.ids, blobs, strict=True)]


class Malformed:
    """What arrived that was no message, or a group that was none.

    Attributes:
        count: how much that was.
    """

    def __init__(self) -> None:
        self.count = 0
        self._news = LogInterval(SAY_EVERY_S)

    def note(self, event: str, **fields: str) -> None:
        """Counts it; says so now and then, because anybody can send a lot of it."""
        self.count += 1
        if self._news.due():
            log.warning(event, dropped=self.count, **fields)
