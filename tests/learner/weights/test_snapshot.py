"""A snapshot holds a version's weights, out of the optimizer's reach."""

import pytest
import torch
import xxhash
from torch import nn

from slipstream.buffer.wire.weights.layout import SHARED_MEMORY
from slipstream.buffer.wire.weights.protocol import Probe
from slipstream.learner.weights import snapshot as snapshots
from slipstream.learner.weights.snapshot import SnapshotTaker
from tests.full_disk import files_of_at_most

CPU = torch.device("cpu")


def model() -> nn.Module:
    """Parameters whose sizes are no multiples of the alignment."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_snapshot_has_all_parameters_in_engine_precision(dtype: torch.dtype) -> None:
    weights = model()
    snapshot = SnapshotTaker(weights, dtype=dtype, bucket_bytes=64, device=CPU).take(4, evaluate=True, keep=True)
    assert snapshot is not None
    assert (snapshot.manifest.version, snapshot.manifest.evaluate, snapshot.manifest.bucket_bytes) == (4, True, 64)
    found = dict(snapshot.named_tensors())
    assert found.keys() == dict(weights.named_parameters()).keys()
    for name, parameter in weights.named_parameters():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], parameter.detach().to(dtype)), name


def test_training_and_next_snapshot_leave_snapshot_unchanged() -> None:
    weights = model()
    taker = SnapshotTaker(weights, dtype=torch.float32, bucket_bytes=64, device=CPU)
    first = taker.take(1, evaluate=False, keep=True)
    assert first is not None
    before = first.data.clone()
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.add_(1.0)
    second = taker.take(2, evaluate=False, keep=True)
    assert second is not None
    assert torch.equal(first.data, before)
    assert not torch.equal(second.data, before)


def test_a_rank_that_does_not_publish_has_no_snapshot() -> None:
    taker = SnapshotTaker(model(), dtype=torch.float32, bucket_bytes=64, device=CPU)
    assert taker.take(1, evaluate=False, keep=False) is None


def test_a_snapshot_in_shared_memory_is_read_there_by_others(run_name: str) -> None:
    weights = model()
    taker = SnapshotTaker(weights, dtype=torch.float32, bucket_bytes=64, device=CPU, segments=run_name)
    first = taker.take(1, evaluate=False, keep=True)
    second = taker.take(2, evaluate=False, keep=True)
    assert first is not None
    assert second is not None
    for snapshot in (first, second):
        assert snapshot.segment is not None
        assert snapshot.segment.read_bytes() == snapshot.data.numpy().tobytes()
    assert first.segment != second.segment
    taker.close()
    assert first.segment is not None
    assert not first.segment.exists()
    assert torch.equal(dict(second.named_tensors())["1.bias"], dict(weights.named_parameters())["1.bias"].detach())


def test_without_room_in_shared_memory_the_bytes_lie_elsewhere(run_name: str) -> None:
    with files_of_at_most(10):
        taker = SnapshotTaker(model(), dtype=torch.float32, bucket_bytes=64, device=CPU, segments=run_name)
    snapshot = taker.take(1, evaluate=False, keep=True)
    assert snapshot is not None
    assert snapshot.segment is None
    assert "can't hold" in (taker.no_shared_memory or "")
    assert list(SHARED_MEMORY.glob(f"*{run_name}*")) == []
    taker.close()


def test_a_sealed_snapshot_says_what_its_bytes_are() -> None:
    probe = Probe(token_ids=[1, 2], logprobs=[-0.5])
    taker = SnapshotTaker(model(), dtype=torch.bfloat16, bucket_bytes=64, device=CPU)
    snapshot = taker.take(1, evaluate=False, keep=True, probe=probe)
    assert snapshot is not None
    assert snapshot.manifest.checksums == []
    sealed = snapshot.sealed()
    assert sealed.manifest.probe == probe
    assert sealed.manifest.checksums == [
        xxhash.xxh3_64_intdigest(tensor.view(torch.uint8).numpy().tobytes()) for _, tensor in sealed.named_tensors()
    ]


class Event:
    """An event of a GPU, which notes what is done with it."""

    def __init__(self, noted: list[str], name: str) -> None:
        self.synchronize = lambda: noted.append(f"{name} synchronized")
        self.wait = lambda: noted.append(f"{name} awaited by a stream")


@pytest.mark.parametrize("relay", [None, CPU])
def test_snapshot_is_complete_after_the_event_of_its_last_copy(
    monkeypatch: pytest.MonkeyPatch, relay: torch.device | None
) -> None:
    weights, noted, names = model(), list[str](), iter("abcd")
    taker = SnapshotTaker(weights, dtype=torch.bfloat16, bucket_bytes=64, device=CPU, relay=relay)
    monkeypatch.setattr(snapshots, "after", lambda _: Event(noted, next(names)))
    first = taker.take(1, evaluate=False, keep=True)
    with torch.no_grad():
        weights.get_parameter("1.bias").add_(1.0)
    second = taker.take(2, evaluate=False, keep=True)
    assert first is not None
    assert second is not None
    second.sealed()
    if relay is None:
        assert noted == ["b synchronized"]
    else:  # the relay is overwritten once it was copied, and copied once it is filled
        waits = ["a awaited by a stream", "b awaited by a stream", "c awaited by a stream"]
        assert noted == [*waits, "d synchronized"]
    difference = dict(second.named_tensors())["1.bias"] - dict(first.named_tensors())["1.bias"]
    assert difference.item() == pytest.approx(1.0, abs=0.01)
