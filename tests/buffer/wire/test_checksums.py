"""Each tensor's checksum is its own, in whatever order and by whichever thread it is taken."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from slipstream.buffer.wire.weights.layout import PIECE_BYTES, SMALL_BYTES, Checksums, layout
from slipstream.buffer.wire.weights.protocol import TensorInfo

SIZES = st.lists(st.sampled_from([0, 1, 31, 4096, PIECE_BYTES + 1, SMALL_BYTES]), min_size=1, max_size=6)


def tensors_of(sizes: list[int]) -> tuple[list[TensorInfo], memoryview, list[int]]:
    """Tensors of so many numbers, bytes for them, and the checksum of each."""
    tensors = [TensorInfo(f"t{number}", "bfloat16", [size]) for number, size in enumerate(sizes)]
    offsets, size_bytes = layout(tensors)
    data = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)
    sums = [
        xxhash.xxh3_64_intdigest(data[offset : offset + tensor.size_bytes].data)
        for offset, tensor in zip(offsets, tensors, strict=True)
    ]
    return tensors, data.data, sums


@given(sizes=SIZES, steps=st.lists(st.floats(0, 1), max_size=4))
def test_incremental_checksums_equal_checksums_of_whole(sizes: list[int], steps: list[float]) -> None:
    tensors, data, sums = tensors_of(sizes)
    checksums = Checksums(data, tensors)
    for step in sorted(steps):
        checksums.arrived(int(step * len(data)))
    assert checksums.all() == sums


@given(sizes=SIZES)
def test_a_copy_has_the_bytes_and_the_checksums_of_its_source(sizes: list[int]) -> None:
    tensors, source, sums = tensors_of(sizes)
    into = bytearray(len(source))
    checksums = Checksums(memoryview(into), tensors)
    checksums.copied(source)
    assert checksums.all() == sums
    offsets, _ = layout(tensors)
    for offset, tensor in zip(offsets, tensors, strict=True):  # what lies between them only aligns the next one
        assert into[offset : offset + tensor.size_bytes] == source[offset : offset + tensor.size_bytes]


@pytest.mark.parametrize("size", [SMALL_BYTES // 4, SMALL_BYTES])
def test_a_byte_that_differs_changes_one_tensors_checksum(size: int) -> None:
    tensors, data, sums = tensors_of([7, size, 7])
    offsets, _ = layout(tensors)
    damaged = bytearray(data)
    damaged[offsets[1] + size] ^= 1
    found = Checksums(memoryview(damaged), tensors).all()
    assert [ours != theirs for ours, theirs in zip(found, sums, strict=True)] == [False, True, False]
