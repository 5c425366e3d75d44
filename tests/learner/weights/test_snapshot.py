"""A snapshot holds a version's weights, out of the optimizer's reach."""

import pytest
import torch
from torch import nn

from slipstream.buffer.wire.weights import layout
from slipstream.learner.weights.snapshot import SnapshotTaker

CPU = torch.device("cpu")


def model() -> nn.Module:
    """Parameters whose sizes are no multiples of the alignment."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_snapshot_has_every_parameter_under_its_name_in_the_engines_precision(dtype: torch.dtype) -> None:
    weights = model()
    snapshot = SnapshotTaker(weights, dtype=dtype, bucket_bytes=64, device=CPU).take(4, evaluate=True, keep=True)
    assert snapshot is not None
    assert (snapshot.manifest.version, snapshot.manifest.evaluate, snapshot.manifest.bucket_bytes) == (4, True, 64)
    found = dict(snapshot.named_tensors())
    assert found.keys() == dict(weights.named_parameters()).keys()
    for name, parameter in weights.named_parameters():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], parameter.detach().to(dtype)), name


def test_tensors_lie_where_the_wire_says() -> None:
    weights = model()
    snapshot = SnapshotTaker(weights, dtype=torch.float32, bucket_bytes=64, device=CPU).take(
        1, evaluate=False, keep=True
    )
    assert snapshot is not None
    offsets, total = layout(snapshot.manifest.tensors)
    assert snapshot.data.numel() == total
    for offset, parameter in zip(offsets, weights.parameters(), strict=True):
        wanted = parameter.detach().numpy().tobytes()
        assert snapshot.data[offset : offset + len(wanted)].numpy().tobytes() == wanted


def test_training_on_does_not_change_a_snapshot_nor_does_the_next_one() -> None:
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


def test_tied_parameters_travel_once() -> None:
    tied = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    tied["head"].weight = tied["embedding"].weight
    snapshot = SnapshotTaker(tied, dtype=torch.float32, bucket_bytes=64, device=CPU).take(1, evaluate=False, keep=True)
    assert snapshot is not None
    assert [name for name, _ in snapshot.named_tensors()] == ["embedding.weight"]
