"""A stream over ZeroMQ: members pull, at their own pace, what changed since the version that they keep."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import zmq

from slipstream.buffer.wire.auth import service_keys
from slipstream.buffer.wire.codec import FrameError, decode, encode
from slipstream.buffer.wire.sockets import bind_router
from slipstream.buffer.wire.weights.protocol import Gone, Part, Piece, Pull, Source
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.network import tcp_address
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports.base import TransferError
from slipstream.learner.weights.transports.file import Differences, following

log = get_log("learner.weights.stream")

MAX_PULL_BYTES = 1 << 16


class StreamTransport:
    """Serves the last version whole, and the differences between the last `full_every` versions.

    The version before the last is still served whole too, until the next one is prepared: who began to fetch it may
    finish.
    """

    def __init__(self, config: RunConfig, *, full_every: int) -> None:
        """Listens. Raises: ConfigError when the address is taken, or a key file is missing."""
        self._place = tcp_address(config.weights.host, config.weights.stream_port)
        self._full_every = full_every
        self._last = Differences(kept=2)
        self._whole: list[Part] = []
        self._steps: list[Part] = []
        self._bytes: Mapping[str, memoryview] = {}
        # A context of its own: ZeroMQ has room for the keys of one listening socket in each.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._bind(config)
        self._thread = threading.Thread(target=self._serve, name="weights stream", daemon=True)
        self._thread.start()

    def _bind(self, config: RunConfig) -> "zmq.Socket[bytes]":
        address = tcp_address(config.weights.bind, config.weights.stream_port)
        keys = service_keys(config.security)
        try:
            return bind_router(self._context, address, max_message_bytes=MAX_PULL_BYTES, keys=keys)
        except ConfigError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"{error} (weights.bind, weights.stream_port)") from None

    def prepare(self, snapshot: Snapshot) -> None:
        """Copies the version, and works out what changed in it."""
        if not self._thread.is_alive():
            raise TransferError("the thread that serves the stream has died; this learner's log says of what")
        version = snapshot.manifest.version
        if version == self._last.version:
            return
        bytes_: dict[str, memoryview] = {}
        if self._last.version >= 0 and self._full_every > 1:
            difference = self._last.to(snapshot)
            name = f"{self._last.version}-{version}"
            self._steps.append(Part(name=name, version=version, size_bytes=len(difference), base=self._last.version))
            bytes_[name] = memoryview(difference)
        self._withdraw(self._whole[:-1])  # the new one takes its place in memory
        self._last.keep(snapshot)
        self._whole.append(Part(name=str(version), version=version, size_bytes=snapshot.data.numel()))
        bytes_[str(version)] = self._last.newest.data
        self._whole = self._whole[-2:]
        self._steps = self._steps[-(self._full_every - 1) :]
        while sum(step.size_bytes for step in self._steps[:-1]) >= self._whole[-1].size_bytes:
            del self._steps[0]  # whoever needs it is better off with the whole version
        served = {part.name for part in (*self._whole, *self._steps)}
        self._bytes = {name: content for name, content in {**self._bytes, **bytes_}.items() if name in served}

    def source(self, snapshot: Snapshot, staged: int) -> Source:
        """The differences since `staged`, or the whole version where that is less."""
        whole = self._whole[-1]
        assert whole.version == snapshot.manifest.version, "source() after prepare() of the same version"
        steps = [] if staged == whole.version else following(self._steps, staged)
        if steps is None or sum(step.size_bytes for step in steps) >= whole.size_bytes:
            steps = [whole]
        return Source(place=self._place, parts=steps)

    def _withdraw(self, parts: Sequence[Part]) -> None:
        gone = {part.name for part in parts}
        self._bytes = {name: content for name, content in self._bytes.items() if name not in gone}

    def close(self) -> None:
        """Ends the thread, and with it the socket."""
        self._context.term()

    # --- in the thread ------------------------------------------------------------------------------------------------

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
            log.warning("frame dropped", peer=peer.hex(), reason=str(error))
            return
        content = self._bytes.get(pull.part)
        reply: list[Any] = [peer, encode(Gone(part=pull.part))]
        if content is not None and 0 <= pull.offset < len(content):
            piece = content[pull.offset : pull.offset + pull.size_bytes]
            reply = [peer, encode(Piece(part=pull.part, offset=pull.offset)), piece]
        try:
            # Not copied: who pulls and never reads costs no memory.
            self._socket.send_multipart(reply, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            log.info("piece not sent: the server is gone, or does not read", peer=peer.hex(), part=pull.part)
