"""The server of byte ranges."""

from contextlib import closing

import structlog
import zmq

from slipstream.buffer.wire.codec import decode, encode
from slipstream.buffer.wire.weights.protocol import Gone, Piece, Pull
from slipstream.learner.weights.fetch import PartServer

DEADLINE_MS = 20_000


def test_malformed_requests_are_counted_and_others_answered() -> None:
    with (
        structlog.testing.capture_logs() as logs,
        closing(PartServer("tcp://127.0.0.1:*", keys=None)) as server,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as peer,
    ):
        server.parts = {"1": memoryview(b"0123456789")}
        peer.setsockopt(zmq.RCVTIMEO, DEADLINE_MS)
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(server.place)
        for _ in range(3):
            peer.send(b"nonsense")
        peer.send(encode(Pull(part="1", offset=2, size_bytes=3)))
        header, piece = peer.recv_multipart()
        assert (decode(header, Piece), piece) == (Piece(part="1", offset=2), b"234")
        peer.send(encode(Pull(part="2", offset=0, size_bytes=3)))
        assert decode(peer.recv(), Gone) == Gone(part="2")
        assert (server.dropped_frames, server.sent_bytes) == (3, 3)
    assert [line["dropped"] for line in logs if line["event"] == "frame dropped"] == [1], "at intervals"
