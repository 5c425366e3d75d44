"""A difference to the right bytes gives the new version bit for bit; a damaged or foreign one is refused.

Other bytes under the right number are refused by `Staging`, and tried with it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from slipstream.buffer.wire.weights import delta
from slipstream.buffer.wire.weights.layout import layout
from slipstream.buffer.wire.weights.protocol import TensorInfo

SHARES = [0.0, 0.001, 0.05, 0.5, 1.0]
SMALL_BLOCK = 4096
"""Has room for gaps that don't fit into a byte, and only for a part of the tensors here."""


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "BLOCK_BYTES", SMALL_BLOCK)
        yield


@st.composite
def shapes(draw: st.DrawFn) -> list[int]:
    """Any, and those with which a block just ends."""
    if draw(st.booleans()):
        return draw(st.lists(st.integers(0, 80), max_size=2))
    return [draw(st.integers(1, 3)) * SMALL_BLOCK // draw(st.sampled_from([2, 4])) + draw(st.integers(-3, 3))]


@st.composite
def changes(draw: st.DrawFn) -> tuple[list[TensorInfo], delta.Bytes, delta.Bytes]:
    """Tensors, and their bytes in two versions; small steps of few numbers as well as new noise everywhere."""
    tensors = [
        TensorInfo(
            name=f"t{number}",
            dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
            shape=draw(shapes()),
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
@small_blocks()
def test_what_is_applied_is_the_new_version(change: tuple[list[TensorInfo], delta.Bytes, delta.Bytes]) -> None:
    tensors, old, new = change
    frame = delta.encode(old, new, tensors, base=3, version=5)
    delta.apply(frame, old, tensors, held=3)
    assert same_tensors(tensors, old, new)


@given(changes(), st.data())
@small_blocks()
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


def test_difference_to_other_version_leaves_bytes_unchanged() -> None:
    old, new = versions()
    before = old.copy()
    with pytest.raises(delta.DeltaError, match="from version 3 to 5 can't be applied to version 4"):
        delta.apply(delta.encode(old, new, TENSORS, base=3, version=5), old, TENSORS, held=4)
    assert np.array_equal(old, before)


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
    ("block", "reason"),
    [
        ({"kind": 0, "size_bytes": 3, "changed": 0}, "malformed: a block of kind 0 with 3 bytes"),
        ({"kind": 1, "size_bytes": 3, "changed": 1}, "malformed"),
        ({"kind": 2, "size_bytes": 3, "changed": 1}, "malformed"),
        ({"kind": 9, "size_bytes": 3, "changed": 0}, "malformed: a block of kind 9"),
        ({"kind": 2, "size_bytes": 2, "changed": 1}, "has 3 bytes of blocks, not 2"),
    ],
)
def test_a_forged_difference_is_refused(block: dict[str, int], reason: str) -> None:
    tensors = [TensorInfo(name="a", dtype="bfloat16", shape=[4])]
    frame = forged({"base": 0, "version": 1, "sizes": [8], "blocks": [block]}, b"abc")
    with pytest.raises(delta.DeltaError, match=reason):
        delta.apply(frame, np.zeros(16, np.uint8), tensors, held=0)


@pytest.mark.parametrize(
    ("plain", "changed", "reason"),
    [
        (bytes([0, 0]), 2, "malformed: 2 bytes for 2 groups"),
        (bytes([0, 0, 7]), 1, "malformed: 3 bytes for 1 groups"),
        (bytes([0, 0b11]), 1, "malformed: 2 bytes for 1 groups"),
        (bytes([255, 0]), 1, "malformed: 2 bytes for 1 groups"),
        (bytes([1, 0]), 1, "malformed: index 1 is out of bounds"),
        (bytes(15), 1, "malformed: a block of 15 bytes where 14 are the most"),
        (bytes([0, 0]), -1, "malformed"),
    ],
)
def test_forged_changes_are_refused(plain: bytes, changed: int, reason: str) -> None:
    tensors = [TensorInfo(name="a", dtype="bfloat16", shape=[4])]
    payload = zstandard.ZstdCompressor().compress(plain)
    block = {"kind": 1, "size_bytes": len(payload), "changed": changed}
    frame = forged({"base": 0, "version": 1, "sizes": [8], "blocks": [block]}, payload)
    with pytest.raises(delta.DeltaError, match=reason):
        delta.apply(frame, np.zeros(16, np.uint8), tensors, held=0)


@pytest.mark.parametrize("blocks", [0, 2])
def test_a_forged_difference_of_fewer_or_more_blocks_is_refused(blocks: int) -> None:
    tensors = [TensorInfo(name="a", dtype="bfloat16", shape=[4])]
    same = {"kind": 0, "size_bytes": 0, "changed": 0}
    frame = forged({"base": 0, "version": 1, "sizes": [8], "blocks": [same] * blocks}, b"")
    with pytest.raises(delta.DeltaError, match=f"has {blocks} blocks, not 1"):
        delta.apply(frame, np.zeros(16, np.uint8), tensors, held=0)
