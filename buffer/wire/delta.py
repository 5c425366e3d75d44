"""What changed between two versions' bytes, without loss: a fraction of a percent of a bfloat16 model at small steps.

A frame is: xxh3 (64 bits) of the rest · length of the header (32 bits) · header (msgpack) · payloads of the blocks.

A block is a stretch of one tensor, seen as unsigned integers of its item size. An optimizer's step moves a number by
few units in the last place, so differences of those integers are small; zigzag (0, -1, 1, -2, … as 0, 1, 2, 3, …) and
one plane per byte make runs of zeros of them, which zstd packs.
"""

import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from slipstream.buffer.wire.messages import Record
from slipstream.buffer.wire.weights import TensorInfo, layout
from slipstream.configs.errors import SlipstreamError

Bytes = NDArray[np.uint8]
Items = NDArray[Any]

SAME, SPARSE, DENSE, FULL = range(4)
"""Of a block: nothing changed; positions and differences of what did; all differences; the new bytes as they are."""
SPARSE_BELOW = 1 / 8
"""Share of changed items under which their positions are told. Measured: at 5 % half of the bytes of DENSE."""
BLOCK_BYTES = 8 << 20
ESCAPE = 255
_LEAD = struct.Struct("<QI")
_ITEMS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


class DeltaError(SlipstreamError):
    """A difference is damaged, or is not one to the version that is there."""


class Block(Record, frozen=True):
    """A stretch of a tensor; all but the last of a tensor are of the same size."""

    kind: int
    size_bytes: int
    """Of its payload."""
    changed: int
    """Items that differ."""


class Changed(Record, frozen=True):
    """One tensor."""

    size_bytes: int
    checksum: int
    """xxh3 (64 bits) of its new bytes."""
    blocks: list[Block]


class Header(Record, frozen=True):
    """What a frame holds."""

    base: int
    version: int
    block_bytes: int
    tensors: list[Changed]


def encode(old: Bytes, new: Bytes, tensors: Sequence[TensorInfo], *, base: int, version: int) -> bytes:
    """What leads from `old`, the bytes of version `base`, to `new`, those of `version`, as `layout` orders both."""
    with _threads() as threads:
        stretches = [list(_stretches(info, offset)) for info, offset in _placed(tensors)]
        flat = [(stretch, info) for info, part in zip(tensors, stretches, strict=True) for stretch in part]
        coded = iter(list(threads.map(lambda each: _encode_block(old, new, *each), flat)))
        views = [new[offset : offset + info.size_bytes] for info, offset in _placed(tensors)]
        sums = list(threads.map(xxhash.xxh3_64_intdigest, views))
    changed, payloads = [], []
    for info, part, checksum in zip(tensors, stretches, sums, strict=True):
        blocks = [next(coded) for _ in part]
        changed.append(Changed(size_bytes=info.size_bytes, checksum=checksum, blocks=[block for block, _ in blocks]))
        payloads += [payload for _, payload in blocks]
    header = msgspec.msgpack.encode(Header(base=base, version=version, block_bytes=BLOCK_BYTES, tensors=changed))
    rest = b"".join([struct.pack("<I", len(header)), header, *payloads])
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(rest)) + rest


def apply(delta: bytes | bytearray | memoryview, data: Bytes, tensors: Sequence[TensorInfo], *, held: int) -> None:
    """Makes the new version of `data`, the bytes of version `held`, in place.

    Raises: DeltaError. Damage, other sizes and another base are found before `data` is touched; if a checksum tells
    that `data` was not what the difference is to, `data` is of no use afterwards.
    """
    header, payloads = _open(memoryview(delta))
    if header.base != held:
        raise DeltaError(
            f"the difference from version {header.base} to {header.version} can't be applied to version {held}"
        )
    sizes = [info.size_bytes for info in tensors]
    if [tensor.size_bytes for tensor in header.tensors] != sizes or data.size != layout(tensors)[1]:
        raise DeltaError(f"the difference to version {header.version} is one between other tensors")
    work = list(_work(header, tensors, payloads))
    with _threads() as threads:
        try:
            list(threads.map(lambda each: _apply_block(data, *each), work))
        except (zstandard.ZstdError, ValueError, IndexError) as error:
            raise DeltaError(f"the difference to version {header.version} is malformed: {error}") from None
        views = [data[offset : offset + info.size_bytes] for info, offset in _placed(tensors)]
        sums = list(threads.map(xxhash.xxh3_64_intdigest, views))
    for info, changed, found in zip(tensors, header.tensors, sums, strict=True):
        if found != changed.checksum:
            raise DeltaError(
                f"{info.name} does not become that of version {header.version}: version {held} here is another one"
            )


def _threads() -> ThreadPoolExecutor:
    # numpy, zstd and xxhash let other threads run on large arrays.
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="delta")


def _placed(tensors: Sequence[TensorInfo]) -> Iterable[tuple[TensorInfo, int]]:
    return zip(tensors, layout(tensors)[0], strict=True)


def _stretches(info: TensorInfo, offset: int, block_bytes: int = BLOCK_BYTES) -> Iterator[slice]:
    end = offset + info.size_bytes
    for start in range(offset, end, block_bytes):
        yield slice(start, min(start + block_bytes, end))


# --- blocks -----------------------------------------------------------------------------------------------------------


def _encode_block(old: Bytes, new: Bytes, where: slice, info: TensorInfo) -> tuple[Block, bytes]:
    dtype = _ITEMS[info.item_bytes]
    before, after = old[where].view(dtype), new[where].view(dtype)
    positions = np.flatnonzero(before != after)
    count = positions.size
    if count == 0:
        return Block(kind=SAME, size_bytes=0, changed=0), b""
    if count < SPARSE_BELOW * after.size:
        kind, plain = SPARSE, _gaps(positions) + _planes(_zigzag(after[positions] - before[positions]))
    else:
        kind, plain = DENSE, _planes(_zigzag(after - before))
    payload = zstandard.ZstdCompressor(level=1).compress(plain)
    if len(payload) >= after.nbytes:
        kind, payload = FULL, after.tobytes()
    return Block(kind=kind, size_bytes=len(payload), changed=count), payload


def _apply_block(data: Bytes, where: slice, info: TensorInfo, block: Block, payload: memoryview) -> None:
    """Raises: ValueError, IndexError, ZstdError."""
    dtype = _ITEMS[info.item_bytes]
    items = data[where].view(dtype)
    if block.kind == SPARSE:
        plain = _unpacked(payload, at_most=block.changed * (dtype.itemsize + 1) + items.size // ESCAPE)
        split = plain.size - block.changed * dtype.itemsize
        items[_positions(plain[:split])] += _unzigzag(_unplaned(plain[split:], dtype))
    elif block.kind == DENSE:
        items += _unzigzag(_unplaned(_unpacked(payload, at_most=items.nbytes), dtype))
    elif block.kind == FULL:
        items[:] = np.frombuffer(payload, dtype)
    elif block.kind != SAME:
        raise ValueError(f"a block of kind {block.kind}")


def _unpacked(payload: memoryview, *, at_most: int) -> Bytes:
    size = zstandard.frame_content_size(payload)
    if not 0 <= size <= at_most:
        raise ValueError(f"a block of {size} bytes where {at_most} are the most")
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(payload), np.uint8)


def _zigzag(differences: Items) -> Items:
    top = 8 * differences.itemsize - 1
    folded: Items = (differences << 1) ^ (0 - (differences >> top))
    return folded


def _unzigzag(folded: Items) -> Items:
    differences: Items = (folded >> 1) ^ (0 - (folded & 1))
    return differences


def _planes(items: Items) -> bytes:
    """All first bytes, then all second ones, …"""
    return np.ascontiguousarray(items.view(np.uint8).reshape(-1, items.itemsize).T).tobytes()


def _unplaned(plain: Bytes, dtype: np.dtype[Any]) -> Items:
    return np.ascontiguousarray(plain.reshape(dtype.itemsize, -1).T).view(dtype).reshape(-1)


def _gaps(positions: Items) -> bytes:
    """How many unchanged items lie before each changed one: in bytes, where 255 says that 255 more are to come."""
    gaps = np.diff(positions, prepend=-1) - 1
    escapes = gaps // ESCAPE
    coded = np.full(int(escapes.sum()) + gaps.size, ESCAPE, np.uint8)
    coded[np.cumsum(escapes + 1) - 1] = gaps % ESCAPE
    return coded.tobytes()


def _positions(coded: Bytes) -> NDArray[np.int64]:
    last = np.flatnonzero(coded != ESCAPE)
    positions: NDArray[np.int64] = np.cumsum(coded, dtype=np.int64)[last] + np.arange(last.size)
    return positions


# --- frames -----------------------------------------------------------------------------------------------------------


def _open(frame: memoryview) -> tuple[Header, memoryview]:
    """The header and all payloads. Raises: DeltaError when a bit of it is not what was sent."""
    if len(frame) < _LEAD.size:
        raise DeltaError(f"a difference of {len(frame)} bytes is cut off")
    checksum, size = _LEAD.unpack_from(frame)
    if xxhash.xxh3_64_intdigest(frame[8:]) != checksum:
        raise DeltaError(f"a difference of {len(frame)} bytes arrived damaged")
    start = _LEAD.size
    try:
        header = msgspec.msgpack.decode(frame[start : start + size], type=Header)
    except msgspec.DecodeError as error:
        raise DeltaError(f"the header of a difference is malformed: {error}") from None
    return header, frame[start + size :]


def _work(
    header: Header, tensors: Sequence[TensorInfo], payloads: memoryview
) -> Iterator[tuple[slice, TensorInfo, Block, memoryview]]:
    """Every block, where it belongs, and its payload. Raises: DeltaError."""
    at = 0
    for (info, offset), changed in zip(_placed(tensors), header.tensors, strict=True):
        if header.block_bytes < 4 or len(changed.blocks) != math.ceil(info.size_bytes / header.block_bytes):
            raise DeltaError(f"the difference to version {header.version} lacks blocks of {info.name}")
        for where, block in zip(_stretches(info, offset, header.block_bytes), changed.blocks, strict=True):
            yield where, info, block, payloads[at : at + block.size_bytes]
            at += block.size_bytes
    if at != len(payloads):
        raise DeltaError(f"the difference to version {header.version} has {len(payloads)} bytes of blocks, not {at}")
