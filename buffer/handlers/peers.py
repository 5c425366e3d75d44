"""Replies to peers, and the count of malformed frames."""

from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode
from slipstream.configs.runtime.logging import LogInterval, get_log

log = get_log("buffer.peers")

GENERATED_IDENTITY = b"\0"
"""First byte of identities that ZeroMQ generates: here for a connection whose peer has come back on another one."""
LOG_EVERY_S = 1.0

Send = Callable[[bytes, m.Message], Awaitable[None]]
"""Sends a message to a peer, by its identity."""


def sender(socket: zmq.asyncio.Socket, gone: Callable[[bytes], None]) -> Send:
    """Sends over a ROUTER socket; `gone` is called with peers that are not there or don't read."""

    async def send(peer: bytes, message: m.Message) -> None:
        try:
            # Not waiting: a peer that doesn't read must not hold up the others.
            await socket.send_multipart([peer, encode(message)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            gone(peer)
            if peer.startswith(GENERATED_IDENTITY):
                return
            log.warning("peer is gone or doesn't read", peer=peer_name(peer), message=type(message).__name__)

    return send


def peer_name(peer: bytes) -> str:
    """A peer's identity as text; any bytes may be one."""
    return peer.decode(errors="backslashreplace")


class MalformedCounter:
    """Frames that are no message, and groups that are none.

    Attributes:
        count: how many there were.
    """

    def __init__(self) -> None:
        self.count = 0
        self._log_interval = LogInterval(LOG_EVERY_S)

    def add(self, event: str, **fields: str) -> None:
        """Counts one, and logs it now and then, because anybody can send many."""
        self.count += 1
        if self._log_interval.due():
            log.warning(event, dropped=self.count, **fields)
