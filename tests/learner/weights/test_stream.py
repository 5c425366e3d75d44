"""Versions and differences that the learner keeps for `stream`."""

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import torch
import zmq

from slipstream.buffer.wire.weights.fabric import TransferError
from slipstream.buffer.wire.weights.protocol import Manifest, Part, TensorInfo
from slipstream.configs import RunConfig
from slipstream.learner.weights.fetch import PartServer, StreamTransport, following
from slipstream.learner.weights.snapshot import Snapshot
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


@pytest.fixture
def stream() -> Iterator[StreamTransport]:
    config = RunConfig.model_validate({"model": {"build": "digits"}, "weights": {"stream_port": free_port()}})
    with closing(StreamTransport(config.weights, config.security, full_every=20)) as transport:
        yield transport


def test_snapshots_are_served_in_place_until_released(stream: StreamTransport) -> None:
    snapshots = [version(number, changed=1.0) for number in range(1, 5)]
    for snapshot in snapshots:
        stream.prepare(snapshot)
        number = snapshot.manifest.version
        whole = {name: bytes_ for name, bytes_ in stream._server.parts.items() if "-" not in name}
        assert set(whole) == {str(number), *([str(number - 1)] if number > 1 else [])}
        assert all(np.shares_memory(bytes_, snapshots[int(name) - 1].data.numpy()) for name, bytes_ in whole.items())
        stream.release(number - 1)
        assert str(number - 1) not in stream._server.parts


def test_difference_needs_an_unreleased_base(stream: StreamTransport) -> None:
    for number in range(1, 5):
        snapshot = version(number, changed=0.1)
        stream.prepare(snapshot)
        bases = [part.base for part in stream.source(snapshot, staged=number - 1).parts]
        assert bases == [None if number in (1, 3) else number - 1]
        if number == 2:
            stream.release(2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_prepare_fails_when_stream_thread_is_dead(stream: StreamTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(server: PartServer, peer: bytes, frames: list[bytes]) -> None:
        raise zmq.ZMQError(zmq.ENOTSOCK)

    monkeypatch.setattr(PartServer, "_answer", fail)
    stream.prepare(version(1, changed=1.0))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(stream._server.place)
        socket.send(b"pull")
        wait_until(lambda: not stream._server.alive)
    with pytest.raises(TransferError):
        stream.prepare(version(2, changed=1.0))


def test_differences_larger_than_whole_version_are_dropped(stream: StreamTransport) -> None:
    for number in range(1, 13):
        snapshot = version(number, changed=0.3)
        stream.prepare(snapshot)
    assert [part.base for part in stream.source(snapshot, staged=10).parts] == [10, 11]
    assert [part.base for part in stream.source(snapshot, staged=5).parts] == [None], "the whole is less"
    assert sum(map(len, stream._server.parts.values())) < 4 * SIZE_BYTES


@pytest.mark.parametrize(("staged", "versions"), [(0, None), (1, [2, 3]), (2, [3]), (3, []), (4, None)])
def test_lagging_member_gets_differences_from_its_version(staged: int, versions: list[int] | None) -> None:
    chain = [Part(name=str(base), version=base + 1, size_bytes=1, base=base) for base in (1, 2)]
    parts = following(chain, staged)
    assert (None if parts is None else [part.version for part in parts]) == versions
    assert following([], staged) is None
