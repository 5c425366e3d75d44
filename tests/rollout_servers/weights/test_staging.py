"""Staging keeps one version's bytes, and calls nothing a version that is not what was sent."""

import itertools

import numpy as np
import pytest
import torch
import xxhash

from slipstream.buffer.wire.weights import delta
from slipstream.buffer.wire.weights.fabric import TransferError
from slipstream.buffer.wire.weights.layout import SHARED_MEMORY, layout
from slipstream.buffer.wire.weights.protocol import Manifest, TensorInfo
from slipstream.rollout_servers.engines.staging import Staging

TENSORS = [TensorInfo(name="a", dtype="bfloat16", shape=[3, 5]), TensorInfo(name="b", dtype="float32", shape=[4])]


def manifest(version: int, data: torch.Tensor, tensors: list[TensorInfo] = TENSORS) -> Manifest:
    sums = [
        xxhash.xxh3_64_intdigest(data[offset : offset + info.size_bytes].numpy().data)
        for info, offset in zip(tensors, layout(tensors)[0], strict=True)
    ]
    return Manifest(version=version, tensors=tensors, bucket_bytes=1 << 16, evaluate=False, checksums=sums)


@pytest.fixture
def sent() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, layout(TENSORS)[1], dtype=np.uint8))


@pytest.mark.parametrize("shared", [False, True])
def test_a_version_is_held_once_its_bytes_are_verified(run_name: str, shared: bool, sent: torch.Tensor) -> None:
    staging = Staging(run_name, shared=shared)
    staging.begin(manifest(4, sent)).copy_(sent)
    assert staging.version == -1
    staging.finish(manifest(4, sent))
    assert staging.version == 4
    found = dict(staging.named_tensors(manifest(4, sent)))
    assert torch.equal(found["a"].view(torch.int16), sent[:30].view(torch.int16).view(3, 5))
    assert torch.equal(found["b"].view(torch.int32), sent[32:].view(torch.int32))
    files = list(SHARED_MEMORY.glob(f"*{run_name}*"))
    assert [file.read_bytes() for file in files] == ([sent.numpy().tobytes()] if shared else [])
    assert not shared or files == [staging.path]
    staging.abandon()


def test_size_change_frees_previous_memory(run_name: str, sent: torch.Tensor) -> None:
    staging = Staging(run_name, shared=True)
    staging.begin(manifest(1, sent))
    path = staging.path
    assert staging.begin(manifest(2, sent[:32], TENSORS[:1])).numel() == layout(TENSORS[:1])[1]
    assert staging.path != path
    assert list(SHARED_MEMORY.glob(f"*{run_name}*")) == [staging.path]
    staging.abandon()


def test_the_next_version_lies_over_the_last_in_the_same_memory(run_name: str, sent: torch.Tensor) -> None:
    staging = Staging(run_name, shared=True)
    staging.begin(manifest(1, sent)).copy_(sent)
    staging.finish(manifest(1, sent))
    path = staging.path
    data = staging.begin(manifest(2, sent))
    assert torch.equal(data, sent)
    assert (staging.version, staging.path) == (-1, path)
    staging.abandon()
    assert not path.exists()


def test_damage_is_named_and_leaves_no_version(run_name: str, sent: torch.Tensor) -> None:
    staging = Staging(run_name, shared=False)
    data = staging.begin(manifest(1, sent)).copy_(sent)
    data[40] ^= 1
    with pytest.raises(TransferError, match=r"version 1\b.*\bb\b"):
        staging.finish(manifest(1, sent))
    assert staging.version == -1


@pytest.mark.parametrize(("byte", "name"), [(0, "a"), (100, "a"), (1999, "a"), (2000, "b"), (2027, "b")])
def test_difference_to_other_bytes_of_same_version_is_refused(run_name: str, byte: int, name: str) -> None:
    """Neither in a tensor that they change, nor in one that they leave as it is."""
    tensors = [TensorInfo(name="a", dtype="bfloat16", shape=[1000]), TensorInfo(name="b", dtype="float32", shape=[7])]
    versions = [torch.arange(layout(tensors)[1]).to(torch.uint8)]
    for step in (100, 77):
        versions.append(versions[-1].clone())
        versions[-1][:2000:step] += 1
    staging = Staging(run_name, shared=False)
    staging.begin(manifest(1, versions[0], tensors)).copy_(versions[0])
    staging.finish(manifest(1, versions[0], tensors))
    staging.data[byte] ^= 1
    last = manifest(3, versions[-1], tensors)
    staging.begin(last)
    for base, (old, new) in enumerate(itertools.pairwise(versions), start=1):
        frame = delta.encode(old.numpy(), new.numpy(), tensors, base=base, version=base + 1)
        staging.change(memoryview(frame), last, held=base)
    with pytest.raises(TransferError, match=f"or version 1 here is another one: checksum of {name} differs"):
        staging.finish(last)
    assert staging.version == -1
    staging.begin(last).copy_(versions[0])
    with pytest.raises(TransferError, match=r"version 3\b.*\ba\b"):  # it came whole
        staging.finish(last)


def test_abandoned_memory_stays_writable_and_unused(run_name: str, sent: torch.Tensor) -> None:
    staging = Staging(run_name, shared=True)
    given_up = staging.begin(manifest(1, sent))
    staging.abandon()
    staging.begin(manifest(1, sent)).copy_(sent)
    given_up.fill_(7)
    staging.finish(manifest(1, sent))
    staging.abandon()
