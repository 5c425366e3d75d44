"""What the service says to its peers."""

from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode
from slipstream.configs.runtime.logging import get_log

log = get_log("buffer.sending")

MADE_UP = b"\0"
"""How ZeroMQ begins the names that it gives: here to a connection whose peer has come back on another one."""

Send = Callable[[bytes, m.Message], Awaitable[None]]
"""Says something to a peer, by its identity."""


def sender(socket: zmq.asyncio.Socket, gone: Callable[[bytes], None]) -> Send:
    """Sends over a ROUTER socket; `gone` is told of peers that are not there or don't read."""

    async def send(peer: bytes, message: m.Message) -> None:
        try:
            # Not waiting: a peer that doesn't read what it is sent must not hold up the others.
            await socket.send_multipart([peer, encode(message)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            gone(peer)
            if peer.startswith(MADE_UP):
                return
            log.warning("peer is gone or doesn't read", peer=peer_name(peer), message=type(message).__name__)

    return send


def peer_name(peer: bytes) -> str:
    """A peer's identity as text; any bytes may be one."""
    return peer.decode(errors="backslashreplace")
