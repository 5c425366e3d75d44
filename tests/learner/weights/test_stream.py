"""Versions and differences that the learner keeps for `stream`."""

from contextlib import closing

import pytest
import torch
import zmq

from slipstream.buffer.wire.weights.protocol import Manifest, TensorInfo
from slipstream.buffer.wire.weights.stream import PartServer
from slipstream.configs import RunConfig
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports.base import TransferError
from slipstream.learner.weights.transports.fetch import Differences, StreamTransport
from tests.conftest import free_port
from tests.learner.weights.learner import wait_until

SIZE_BYTES = 1 << 20


def version(number: int, *, changed: float) -> Snapshot:
    """A version of random bytes, of which this share changes from one version to the next."""
    numbers = torch.randint(256, (SIZE_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    count = round(changed * SIZE_BYTES)
    generator = torch.Generator().manual_seed(number)
    numbers[:count] = torch.randint(256, (count,), dtype=torch.uint8, generator=generator)
    tensors = [TensorInfo(name="weight", dtype="float32", shape=[SIZE_BYTES // 4])]
    manifest = Manifest(version=number, tensors=tensors, bucket_bytes=1 << 16, evaluate=False)
    return Snapshot(manifest, numbers).sealed()


def test_version_being_overwritten_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig.model_validate({"model": {"build": "digits"}, "weights": {"stream_port": free_port()}})
    keep, served = Differences.keep, []

    def watched(differences: Differences, snapshot: Snapshot) -> None:
        served.append(set(transport._server.parts))
        keep(differences, snapshot)

    monkeypatch.setattr(Differences, "keep", watched)
    with closing(StreamTransport(config.weights, config.security, full_every=1)) as transport:
        for number in range(1, 5):
            transport.prepare(version(number, changed=1.0))
        assert served == [set(), {"1"}, {"2"}, {"3"}]
        assert set(transport._server.parts) == {"3", "4"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_prepare_fails_when_stream_thread_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(server: PartServer, peer: bytes, frames: list[bytes]) -> None:
        raise zmq.ZMQError(zmq.ENOTSOCK)

    monkeypatch.setattr(PartServer, "_answer", fail)
    config = RunConfig.model_validate({"model": {"build": "digits"}, "weights": {"stream_port": free_port()}})
    with closing(StreamTransport(config.weights, config.security, full_every=1)) as transport:
        transport.prepare(version(1, changed=1.0))
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"tcp://127.0.0.1:{config.weights.stream_port}")
            socket.send(b"pull")
            wait_until(lambda: not transport._server.alive)
        with pytest.raises(TransferError):
            transport.prepare(version(2, changed=1.0))


def test_differences_larger_than_whole_version_are_dropped() -> None:
    config = RunConfig.model_validate({"model": {"build": "digits"}, "weights": {"stream_port": free_port()}})
    with closing(StreamTransport(config.weights, config.security, full_every=20)) as transport:
        for number in range(1, 13):
            snapshot = version(number, changed=0.3)
            transport.prepare(snapshot)
        assert [part.base for part in transport.source(snapshot, staged=10).parts] == [10, 11]
        assert [part.base for part in transport.source(snapshot, staged=5).parts] == [None], "the whole is less"
        assert sum(map(len, transport._server.parts.values())) < 4 * SIZE_BYTES
