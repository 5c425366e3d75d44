"""Replies to peers, and the counts of replies that nobody reads and of malformed frames."""

from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode
from slipstream.configs.runtime.logging import LogInterval, get_log

log = get_log("buffer.peers")

GENERATED_IDENTITY = b"\0"
"""First byte of identities that ZeroMQ generates, such as for the old connection of a peer that has reconnected."""
LOG_EVERY_S = 1.0

Send = Callable[[bytes, m.Message], Awaitable[None]]
"""Sends a message to a peer, by its identity."""
IsConnected = Callable[[bytes], Awaitable[bool]]


class ReplySender:
    """Sends over a ROUTER socket.

    Attributes:
        unsent: replies so far to peers that are absent or don't read.
    """

    def __init__(self, socket: zmq.asyncio.Socket, gone: Callable[[bytes], None]) -> None:
        """`gone` is called with each peer that is absent or doesn't read."""
        self.unsent = 0
        self._socket = socket
        self._gone = gone
        self._log_interval = LogInterval(LOG_EVERY_S)

    async def __call__(self, peer: bytes, message: m.Message) -> None:
        """Sends a message to a peer, or drops it: peers repeat what has no answer."""
        try:
            # NOBLOCK: a peer that doesn't read must not delay the others.
            await self._socket.send_multipart([peer, encode(message)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._gone(peer)
            self.unsent += 1
            if not peer.startswith(GENERATED_IDENTITY) and self._log_interval.due():
                kind = type(message).__name__
                log.warning("peer is gone or doesn't read", peer=peer_name(peer), message=kind, unsent=self.unsent)


def prober(socket: zmq.asyncio.Socket) -> IsConnected:
    """A function that returns whether a learner is connected.

    It sends an answer to no request, which learners ignore: ZeroMQ reports an absent peer only to a sender.
    """
    probe = encode(m.NotReady(request=0))

    async def is_connected(peer: bytes) -> bool:
        try:
            await socket.send_multipart([peer, probe], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return error.errno == zmq.EAGAIN  # its queue is full
        return True

    return is_connected


def peer_name(peer: bytes) -> str:
    """A peer's identity as text; an identity may be any bytes."""
    return peer.decode(errors="backslashreplace")


class MalformedCounter:
    """Counts malformed frames and groups.

    Attributes:
        count: malformed frames and groups so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._log_interval = LogInterval(LOG_EVERY_S)

    def add(self, event: str, **fields: str) -> None:
        """Counts one; logs at most one per LOG_EVERY_S, because any peer can send many."""
        self.count += 1
        if self._log_interval.due():
            log.warning(event, dropped=self.count, **fields)
