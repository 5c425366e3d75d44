"""Differences between versions: exact, small, and refused when damaged, forged or of another base."""

import contextlib
from collections.abc import Iterator

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
"""Larger than the largest one-byte gap, smaller than some of the tensors."""


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "BLOCK_BYTES", SMALL_BLOCK)
        yield


@st.composite
def shapes(draw: st.DrawFn) -> list[int]:
    """Any shapes, and those near the end of a block."""
    if draw(st.booleans()):
        return draw(st.lists(st.integers(0, 80), max_size=2))
    return [draw(st.integers(1, 3)) * SMALL_BLOCK // draw(st.sampled_from([2, 4])) + draw(st.integers(-3, 3))]


@st.composite
def changes(draw: st.DrawFn) -> tuple[list[TensorInfo], delta.Bytes, delta.Bytes]:
    """Tensors and their bytes in two versions, from few small steps to random bytes."""
    tensors = [
        TensorInfo(
            name=f"t{number}", dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])), shape=draw(shapes())
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
def test_applied_difference_gives_the_new_version(change: tuple[list[TensorInfo], delta.Bytes, delta.Bytes]) -> None:
    tensors, old, new = change
    frame = delta.encode(old, new, tensors, base=3, version=5)
    delta.apply(frame, old, tensors, held=3)
    assert same_tensors(tensors, old, new)


@given(changes(), st.data())
@small_blocks()
def test_damaged_difference_changes_nothing(
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


@pytest.mark.parametrize(
    ("held", "tensors", "size"),
    [(4, TENSORS, None), (3, TENSORS[::-1], None), (3, TENSORS, -16)],
    ids=["other version", "other tensors", "other size"],
)
def test_difference_with_another_base_changes_nothing(held: int, tensors: list[TensorInfo], size: int | None) -> None:
    old = np.random.default_rng(0).integers(0, 256, layout(TENSORS)[1], dtype=np.uint8)
    new = old.copy()
    new[::100] += 1
    before = old.copy()
    with pytest.raises(delta.DeltaError):
        delta.apply(delta.encode(old, new, TENSORS, base=3, version=5), old[:size], tensors, held=held)
    assert np.array_equal(old, before)


def test_few_changes_make_a_small_frame() -> None:
    tensors = [TensorInfo(name="a", dtype="bfloat16", shape=[1 << 20])]
    random = np.random.default_rng(0)
    old = random.integers(0, 256, 2 << 20, dtype=np.uint8)
    new = old.copy()
    new.view("<u2")[random.random(1 << 20) < 0.01] += 1
    assert len(delta.encode(old, new, tensors, base=0, version=1)) < 0.01 * old.size
    assert len(delta.encode(old, old, tensors, base=0, version=1)) < 200


def test_random_bytes_cost_no_more_than_a_whole_version() -> None:
    tensors = [TensorInfo(name="a", dtype="bfloat16", shape=[1 << 20])]
    old, new = np.random.default_rng(0).integers(0, 256, (2, 2 << 20), dtype=np.uint8)
    assert len(delta.encode(old, new, tensors, base=0, version=1)) < old.size + 200


def forged(blocks: list[dict[str, int]], payload: bytes) -> bytes:
    """A frame with a right checksum: from another release, or an attacker."""
    head = msgspec.msgpack.encode({"base": 0, "version": 1, "sizes": [8], "blocks": blocks})
    rest = len(head).to_bytes(4, "little") + head + payload
    return xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest


def block(kind: int, size_bytes: int, changed: int) -> dict[str, int]:
    return {"kind": kind, "size_bytes": size_bytes, "changed": changed}


def assert_refused(frame: bytes) -> None:
    with pytest.raises(delta.DeltaError):
        delta.apply(frame, np.zeros(16, np.uint8), [TensorInfo(name="a", dtype="bfloat16", shape=[4])], held=0)


@pytest.mark.parametrize(
    ("blocks", "payload"),
    [
        ([block(0, 3, 0)], b"abc"), ([block(1, 3, 1)], b"abc"), ([block(2, 3, 1)], b"abc"), ([block(9, 3, 0)], b"abc"),
        ([block(2, 2, 1)], b"abc"), ([], b""), ([block(0, 0, 0)] * 2, b""),
    ],
)  # fmt: skip
def test_forged_blocks_are_refused(blocks: list[dict[str, int]], payload: bytes) -> None:
    assert_refused(forged(blocks, payload))


@pytest.mark.parametrize(
    ("plain", "changed"),
    [
        (bytes([0, 0]), 2), (bytes([0, 0, 7]), 1), (bytes([0, 0b11]), 1), (bytes([255, 0]), 1), (bytes([1, 0]), 1),
        (bytes(15), 1), (bytes([0, 0]), -1),
    ],
)  # fmt: skip
def test_forged_payloads_are_refused(plain: bytes, changed: int) -> None:
    payload = zstandard.ZstdCompressor().compress(plain)
    assert_refused(forged([block(1, len(payload), changed)], payload))
