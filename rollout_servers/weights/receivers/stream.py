"""A stream over ZeroMQ: a version, or what changed since the one that is staged, is pulled from the learner."""

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable

import zmq

from slipstream.buffer.wire.auth import client_keys
from slipstream.buffer.wire.codec import FrameError, decode, encode
from slipstream.buffer.wire.sockets import connect_dealer
from slipstream.buffer.wire.weights.delta import DeltaError
from slipstream.buffer.wire.weights.protocol import Announce, FromStream, Gone, Part, Piece, Pull, Source
from slipstream.configs import RunConfig
from slipstream.rollout_servers.engines.staging import SourceGone, Staging, TransferFailed
from slipstream.rollout_servers.weights.receivers.base import Receiver

PIECE_BYTES = 4 << 20
"""Most bytes of one message: larger ones are slower."""
WINDOW = 8
"""Pieces under way at a time."""
ASK_AGAIN_S = 5.0
"""After so long without any piece those under way are taken for lost, as with a connection that broke; twice as long
each time, or a slow network would carry them twice."""
CHECK_MS = 100


class StreamReceiver(Receiver):
    """Keeps no connection: what is late for one version can't be taken for a piece of the next."""

    def __init__(self, config: RunConfig) -> None:
        self._keys = client_keys(config.security)
        self._closed = threading.Event()

    def receive(self, announce: Announce, staging: Staging) -> None:
        """Pulls the parts one after another."""
        assert announce.source is not None, "stream is fetched from a source"
        held = staging.version
        staging.begin(announce.manifest)
        if announce.source.parts:  # else it is held; a connection that is closed as it is made alarms the learner
            self._pull(announce.source, announce, staging, held)
        staging.finish(announce.manifest)

    def _pull(self, source: Source, announce: Announce, staging: Staging, held: int) -> None:
        manifest, deadline = announce.manifest, time.monotonic() + announce.deadline_s
        identity = uuid.uuid4().hex
        try:
            with (
                zmq.Context[zmq.Socket[bytes]]() as context,
                connect_dealer(
                    context, source.place, identity=identity, keys=self._keys, max_message_bytes=2 * PIECE_BYTES
                ) as socket,
            ):
                pull = _Pulling(socket, source.place, deadline, min(PIECE_BYTES, manifest.bucket_bytes), self._closed)
                for part in source.parts:
                    if part.base is None:
                        pull.part(part, staging.data.numpy().data, staging.arrived)
                    else:
                        difference = bytearray(part.size_bytes)
                        pull.part(part, memoryview(difference))
                        staging.change(difference, manifest, held=held)
                    held = part.version
        except DeltaError as error:
            raise TransferFailed(f"version {manifest.version} from the learner at {source.place}: {error}") from None

    def close(self) -> None:
        """Wakes a transfer under way, which fails."""
        self._closed.set()


class _Pulling:
    """Parts over one connection."""

    def __init__(
        self, socket: "zmq.Socket[bytes]", place: str, deadline: float, piece_bytes: int, closed: threading.Event
    ) -> None:
        self._socket = socket
        self._place = place
        self._deadline = deadline
        self._piece_bytes = piece_bytes
        self._closed = closed
        self._ask_again_s = ASK_AGAIN_S
        self._came: set[tuple[str, int]] = set()

    def part(self, part: Part, into: memoryview, arrived: Callable[[int], None] = lambda _: None) -> None:
        """Fills `into` with a part, and tells up to where it is filled. Raises: TransferFailed."""
        named = f"part {part.name} of the learner's stream at {self._place}"
        if part.size_bytes != len(into):
            raise TransferFailed(f"{named} has {part.size_bytes} bytes, the tensors of its version {len(into)}")
        pieces = {start: into[start : start + self._piece_bytes] for start in range(0, len(into), self._piece_bytes)}
        to_ask = deque(pieces)
        while pieces:
            while to_ask and len(pieces) - len(to_ask) < WINDOW:
                start = to_ask.popleft()
                self._ask(Pull(part=part.name, offset=start, size_bytes=len(pieces[start])), named)
            answer = self._answer(named)
            if answer is None:
                to_ask = deque(pieces)
                continue
            message, content = answer
            if isinstance(message, Gone):
                raise SourceGone(f"{named} is not there any more")
            if (message.part, message.offset) in self._came:
                continue  # it was asked for again, and comes twice
            awaited = pieces.pop(message.offset, None)
            if message.part != part.name or awaited is None or len(content) != len(awaited):
                raise TransferFailed(
                    f"{named}: {len(content)} bytes came at {message.offset}, which were not asked for"
                )
            awaited[:] = content
            self._came.add((message.part, message.offset))
            arrived(next(iter(pieces), len(into)))

    def _ask(self, pull: Pull, named: str) -> None:
        try:
            self._socket.send(encode(pull), zmq.NOBLOCK)
        except zmq.Again:  # ZeroMQ gives up on a service that refuses our key
            raise TransferFailed(f"{named} is refused: are security.keys the same on both sides?") from None

    def _answer(self, named: str) -> tuple[Piece | Gone, memoryview] | None:
        """What comes next; None if nothing has for a while."""
        ask_again_at = time.monotonic() + self._ask_again_s
        while not self._socket.poll(CHECK_MS):
            if self._closed.is_set():
                raise TransferFailed(f"{named} is not wanted any more")
            if time.monotonic() >= self._deadline:
                raise TransferFailed(
                    f"{named} did not come by the deadline: can the port be reached, and are security.keys the same?"
                )
            if time.monotonic() >= ask_again_at:
                self._ask_again_s *= 2
                return None
        head, *rest = self._socket.recv_multipart(copy=False)
        try:
            return decode(head.buffer, FromStream), rest[0].buffer if rest else memoryview(b"")
        except FrameError as error:
            raise TransferFailed(f"{named}: {error}") from None
