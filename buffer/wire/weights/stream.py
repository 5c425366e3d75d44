"""Server of named byte ranges over ZeroMQ, from which rollout servers pull a version and its differences."""

import threading
from collections.abc import Mapping
from typing import Any

import zmq

from slipstream.buffer.wire.auth import ServiceKeys
from slipstream.buffer.wire.codec import FrameError, decode, encode
from slipstream.buffer.wire.sockets import bind_router
from slipstream.buffer.wire.weights.protocol import Gone, Piece, Pull
from slipstream.configs.runtime.logging import LogInterval, get_log

log = get_log("wire.stream")

MAX_PULL_BYTES = 1 << 16
LOG_EVERY_S = 10.0


class PartServer:
    """Answers pulls in a thread, until it is closed.

    Attributes:
        parts: bytes of each part by name; replaced as a whole, so that the thread needs no lock.
        place: the endpoint that it listens on.
        sent_bytes: bytes that were handed to ZeroMQ so far.
        dropped_frames: number of malformed requests so far.
    """

    def __init__(self, address: str, *, keys: ServiceKeys | None) -> None:
        """Listens. Raises: ConfigError when the address is taken."""
        self.parts: Mapping[str, memoryview] = {}
        self.sent_bytes = 0
        self.dropped_frames = 0
        # A context of its own: ZeroMQ authenticates the clients of one listening socket per context.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = bind_router(self._context, address, max_message_bytes=MAX_PULL_BYTES, keys=keys)
        except BaseException:  # raised again; a context with an open socket would block the interpreter's exit
            self._context.destroy(linger=0)
            raise
        self.place = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._dropped = LogInterval(LOG_EVERY_S)
        self._thread = threading.Thread(target=self._serve, name="weights stream", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True if the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread, and with it the socket."""
        self.parts = {}
        if not self._context.closed:
            self._context.term()

    def _serve(self) -> None:
        try:
            while True:
                peer, *frames = self._socket.recv_multipart()
                self._answer(peer, frames)
        except zmq.ContextTerminated:
            pass  # close()
        finally:
            self._socket.close(linger=0)

    def _answer(self, peer: bytes, frames: list[bytes]) -> None:
        try:
            pull = decode(b"".join(frames), Pull)
        except FrameError as error:
            self.dropped_frames += 1
            if self._dropped.due():
                log.warning("frame dropped", peer=peer.hex(), dropped=self.dropped_frames, reason=str(error))
            return
        content = self.parts.get(pull.part)
        reply: list[Any] = [peer, encode(Gone(part=pull.part))]
        piece = memoryview(b"")
        if content is not None and 0 <= pull.offset < len(content):
            piece = content[pull.offset : pull.offset + pull.size_bytes]
            reply = [peer, encode(Piece(part=pull.part, offset=pull.offset)), piece]
        try:
            # Without a copy: a client that pulls and never reads must not cost memory.
            self._socket.send_multipart(reply, zmq.NOBLOCK, copy=False)
            self.sent_bytes += len(piece)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            log.info("piece not sent: the server is gone, or does not read", peer=peer.hex(), part=pull.part)
