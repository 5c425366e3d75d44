"""A difference between two versions gives the new one bit for bit, or is refused; it is never silently wrong."""

from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from slipstream.buffer.wire import delta
from slipstream.buffer.wire.weights import TensorInfo, layout

SHARES = [0.0, 0.001, 0.05, 0.124, 0.126, 0.5, 1.0]


@st.composite
def changes(draw: st.DrawFn) -> tuple[list[TensorInfo], delta.Bytes, delta.Bytes]:
    """Tensors, and their bytes in two versions; small steps of few numbers as well as new noise everywhere."""
    tensors = [
        TensorInfo(
            name=f"t{number}",
            dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
            shape=draw(st.lists(st.integers(0, 40), max_size=2)),
        )
        for number in range(draw(st.integers(0, 4)))
    ]
    offsets, size = layout(tensors)
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    old = random.integers(0, 256, size, dtype=np.uint8)
    new = old.copy()
    for info, offset in zip(tensors, offsets, strict=True):
        kind = np.dtype(f"<u{info.item_bytes}")
        items = new[offset : offset + info.size_bytes].view(kind)
        chosen = random.random(items.size) < draw(st.sampled_from(SHARES))
        reach = draw(st.sampled_from([1, 300, np.iinfo(kind).max]))
        items[chosen] += random.integers(0, reach, int(chosen.sum()), dtype=kind, endpoint=True)
        items[chosen] -= kind.type(reach // 2)
    return tensors, old, new


def same_tensors(tensors: list[TensorInfo], one: delta.Bytes, other: delta.Bytes) -> bool:
    return all(
        np.array_equal(one[offset : offset + info.size_bytes], other[offset : offset + info.size_bytes])
        for info, offset in zip(tensors, layout(tensors)[0], strict=True)
    )


@given(changes())
def test_what_is_applied_is_the_new_version(change: tuple[list[TensorInfo], delta.Bytes, delta.Bytes]) -> None:
    tensors, old, new = change
    frame = delta.encode(old, new, tensors, base=3, version=5)
    delta.apply(frame, old, tensors, held=3)
    assert same_tensors(tensors, old, new)


@given(changes(), st.data())
def test_a_damaged_difference_is_refused_and_touches_nothing(
    change: tuple[list[TensorInfo], delta.Bytes, delta.Bytes], data: st.DataObject
) -> None:
    tensors, old, new = change
    frame = bytearray(delta.encode(old, new, tensors, base=3, version=5))
    where = data.draw(st.integers(0, len(frame) - 1))
    if data.draw(st.booleans()):
        frame[where] ^= data.draw(st.integers(1, 255))
    else:
        del frame[where:]
    before = old.copy()
    with pytest.raises(delta.DeltaError):
        delta.apply(frame, old, tensors, held=3)
    assert np.array_equal(old, before)


TENSORS = [TensorInfo(name="a", dtype="bfloat16", shape=[1000]), TensorInfo(name="b", dtype="float32", shape=[7])]


def versions() -> tuple[delta.Bytes, delta.Bytes]:
    old = np.random.default_rng(0).integers(0, 256, layout(TENSORS)[1], dtype=np.uint8)
    new = old.copy()
    new[::100] += 1
    return old, new


def test_a_difference_to_another_version_is_refused_and_touches_nothing() -> None:
    old, new = versions()
    before = old.copy()
    with pytest.raises(delta.DeltaError, match="from version 3 to 5 can't be applied to version 4"):
        delta.apply(delta.encode(old, new, TENSORS, base=3, version=5), old, TENSORS, held=4)
    assert np.array_equal(old, before)


@pytest.mark.parametrize("byte", [0, 100, 1999, 2000, 2027])
def test_other_bytes_under_the_right_number_are_refused(byte: int) -> None:
    """Even in a tensor that the difference leaves as it is."""
    old, new = versions()
    frame = delta.encode(old, new, TENSORS, base=3, version=5)
    old[byte] ^= 1
    with pytest.raises(delta.DeltaError, match=f"{'a' if byte < 2000 else 'b'} does not become that of version 5"):
        delta.apply(frame, old, TENSORS, held=3)


def test_a_difference_between_other_tensors_is_refused() -> None:
    old, new = versions()
    frame = delta.encode(old, new, TENSORS, base=3, version=5)
    with pytest.raises(delta.DeltaError, match="between other tensors"):
        delta.apply(frame, old, TENSORS[::-1], held=3)
    with pytest.raises(delta.DeltaError, match="between other tensors"):
        delta.apply(frame, old[:-16], TENSORS, held=3)


def test_few_changes_make_a_small_difference() -> None:
    tensors = [TensorInfo(name="a", dtype="bfloat16", shape=[1 << 20])]
    random = np.random.default_rng(0)
    old = random.integers(0, 256, 2 << 20, dtype=np.uint8)
    new = old.copy()
    new.view("<u2")[random.random(1 << 20) < 0.01] += 1
    assert len(delta.encode(old, new, tensors, base=0, version=1)) < 0.01 * old.size
    assert len(delta.encode(old, old, tensors, base=0, version=1)) < 200


def test_noise_costs_no_more_than_the_version_itself() -> None:
    tensors = [TensorInfo(name="a", dtype="bfloat16", shape=[1 << 20])]
    old, new = np.random.default_rng(0).integers(0, 256, (2, 2 << 20), dtype=np.uint8)
    assert len(delta.encode(old, new, tensors, base=0, version=1)) < old.size + 200


def test_a_tensor_of_several_blocks_arrives() -> None:
    items = delta.BLOCK_BYTES // 2 + 3
    tensors = [TensorInfo(name="a", dtype="bfloat16", shape=[items])]
    old = np.zeros(layout(tensors)[1], np.uint8)
    new = old.copy()
    new.view("<u2")[[0, 700, items - 4, items - 3, items - 1]] = [1, 2, 3, 4, 5]
    delta.apply(delta.encode(old, new, tensors, base=0, version=1), old, tensors, held=0)
    assert np.array_equal(old[: 2 * items], new[: 2 * items])


def forged(header: dict[str, Any], payload: bytes) -> bytes:
    """A frame with a right checksum: not damage, but another release, or somebody who means harm."""
    head = msgspec.msgpack.encode(header)
    rest = len(head).to_bytes(4, "little") + head + payload
    return xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest


@pytest.mark.parametrize(
    ("blocks", "block_bytes", "reason"),
    [
        ([], 8, "lacks blocks of a"),
        ([{"kind": 0, "size_bytes": 0, "changed": 0}], 0, "lacks blocks of a"),
        ([{"kind": 9, "size_bytes": 3, "changed": 0}], 8, "malformed: a block of kind 9"),
        ([{"kind": 1, "size_bytes": 3, "changed": 1}], 8, "malformed"),
        ([{"kind": 2, "size_bytes": 3, "changed": 1}], 8, "malformed"),
        ([{"kind": 3, "size_bytes": 3, "changed": 1}], 8, "malformed"),
        ([{"kind": 3, "size_bytes": 2, "changed": 1}], 8, "has 3 bytes of blocks, not 2"),
        ([{"kind": 0, "size_bytes": 3, "changed": 0}], 8, "a does not become"),
    ],
)
def test_a_forged_difference_is_refused(blocks: list[dict[str, int]], block_bytes: int, reason: str) -> None:
    tensors = [TensorInfo(name="a", dtype="bfloat16", shape=[4])]
    changed = {"size_bytes": 8, "checksum": 1, "blocks": blocks}
    frame = forged({"base": 0, "version": 1, "block_bytes": block_bytes, "tensors": [changed]}, b"abc")
    with pytest.raises(delta.DeltaError, match=reason):
        delta.apply(frame, np.zeros(16, np.uint8), tensors, held=0)
