"""What changed between two versions' bytes, without loss: a fraction of a percent of a bfloat16 model at small steps.

A frame is: xxh3 (64 bits) of the rest · length of the header (32 bits) · header (msgpack) · payloads of the blocks.

A block is a stretch of one tensor, seen as groups of 8 bytes, and these as unsigned integers of the tensor's item size.
An optimizer's step moves a number by few units in the last place, so those integers differ by little. Of each group
that changed, a payload tells how far it lies after the one before, in a byte; and of each of its items, in two bits,
whether it is one less, the same, one more, or something else. What doesn't fit into these follows, one plane for each
byte, the differences in zigzag (0, -1, 1, -2, … as 0, 1, 2, 3, …), so that upper bytes are mostly zeros. zstd packs it.

Whether a difference was applied to the right bytes is not told here, but by the checksums in a version's manifest.
"""

import math
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from slipstream.buffer.wire.messages import Record
from slipstream.buffer.wire.weights.layout import layout
from slipstream.buffer.wire.weights.protocol import TensorInfo
from slipstream.configs.runtime.errors import SlipstreamError

Bytes = NDArray[np.uint8]
Items = NDArray[Any]

SAME, CHANGED, FULL = range(3)
"""Of a block: nothing changed; what did change; the new bytes as they are."""
BLOCK_BYTES = 4 << 20
"""Measured: half of it makes more bytes, twice of it takes longer in float32."""
FAR_GAP = 255
"""In place of what is as far or farther."""
FAR_STEP = 3
"""A step is a difference plus one: 0, 1 and 2 fit into two bits, this stands for all others."""
_LEAD = struct.Struct("<QI")
_GROUP = np.dtype("<u8")
_GAP = np.dtype("<u4")
_ITEMS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
# Nothing but zeros repeats: looking harder for matches takes longer, and finds chance ones that save nothing.
_PACKING = zstandard.ZstdCompressionParameters(strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=8, window_log=17)


class DeltaError(SlipstreamError):
    """A difference is damaged, or is not one to the version that is there."""


class Block(Record, frozen=True):
    """A stretch of a tensor."""

    kind: int
    size_bytes: int
    """Of its payload."""
    changed: int
    """Groups that differ."""


class Header(Record, frozen=True):
    """What a frame holds."""

    base: int
    version: int
    sizes: list[int]
    """Bytes of each tensor."""
    blocks: list[Block]
    """One for each BLOCK_BYTES of a tensor, of all tensors in their order."""


def encode(old: Bytes, new: Bytes, tensors: Sequence[TensorInfo], *, base: int, version: int) -> bytes:
    """What leads from `old`, the bytes of version `base`, to `new`, those of `version`, as `layout` orders both."""
    with _threads() as threads:
        coded = list(threads.map(lambda each: _encode_block(old, new, *each), _stretches(tensors)))
    blocks, payloads = [block for block, _ in coded], [payload for _, payload in coded]
    sizes = [info.size_bytes for info in tensors]
    header = msgspec.msgpack.encode(Header(base=base, version=version, sizes=sizes, blocks=blocks))
    rest = b"".join([struct.pack("<I", len(header)), header, *payloads])
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(rest)) + rest


def apply(delta: bytes | bytearray | memoryview, data: Bytes, tensors: Sequence[TensorInfo], *, held: int) -> None:
    """Makes the new version of `data`, the bytes of version `held`, in place.

    Raises: DeltaError. Damage, other sizes and another base are found before `data` is touched. Other bytes under the
    right number are not found here: they make other bytes.
    """
    header, payloads = _open(memoryview(delta))
    if header.base != held:
        raise DeltaError(
            f"the difference from version {header.base} to {header.version} can't be applied to version {held}"
        )
    if header.sizes != [info.size_bytes for info in tensors] or data.size != layout(tensors)[1]:
        raise DeltaError(f"the difference to version {header.version} is one between other tensors")
    work = list(_work(header, tensors, payloads))
    with _threads() as threads:
        try:
            list(threads.map(lambda each: _apply_block(data, *each), work))
        except (zstandard.ZstdError, ValueError, IndexError) as error:
            raise DeltaError(f"the difference to version {header.version} is malformed: {error}") from None


def _threads() -> ThreadPoolExecutor:
    # numpy and zstd let other threads run on large arrays.
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="delta")


def _stretches(tensors: Sequence[TensorInfo]) -> Iterator[tuple[slice, TensorInfo]]:
    for info, offset in zip(tensors, layout(tensors)[0], strict=True):
        end = offset + math.ceil(info.size_bytes / _GROUP.itemsize) * _GROUP.itemsize  # `layout` leaves room for it
        for start in range(offset, end, BLOCK_BYTES):
            yield slice(start, min(start + BLOCK_BYTES, end)), info


# --- blocks -----------------------------------------------------------------------------------------------------------


def _encode_block(old: Bytes, new: Bytes, where: slice, info: TensorInfo) -> tuple[Block, bytes]:
    dtype = _ITEMS[info.item_bytes]
    before, after = old[where].view(_GROUP), new[where].view(_GROUP)
    changed = np.flatnonzero(before != after)
    if changed.size == 0:
        return Block(kind=SAME, size_bytes=0, changed=0), b""
    gaps = np.diff(changed.astype(_GAP), prepend=_GAP.type(0))
    steps = after.take(changed).view(dtype) - before.take(changed).view(dtype) + dtype.type(1)
    far_gaps, far_steps = _taken_out(gaps, FAR_GAP), _taken_out(steps, FAR_STEP)
    planes = [gaps.astype(np.uint8), _codes(steps), *_planes(far_gaps), *_planes(_zigzag(far_steps))]
    kind, payload = CHANGED, _packed(planes)
    if len(payload) >= after.nbytes:
        kind, payload = FULL, after.tobytes()
    return Block(kind=kind, size_bytes=len(payload), changed=changed.size), payload


def _apply_block(data: Bytes, where: slice, info: TensorInfo, block: Block, payload: memoryview) -> None:
    """Raises: ValueError, IndexError, ZstdError."""
    groups = data[where].view(_GROUP)
    if block.kind == CHANGED:
        _apply_changes(groups, _ITEMS[info.item_bytes], _unpacked(payload, at_most=14 * groups.size), block.changed)
    elif block.kind == FULL:
        groups[:] = np.frombuffer(payload, _GROUP)
    elif block.kind != SAME or payload:
        raise ValueError(f"a block of kind {block.kind} with {len(payload)} bytes")


def _apply_changes(groups: Items, dtype: np.dtype[Any], plain: Bytes, count: int) -> None:
    """Raises: ValueError, IndexError."""
    gaps, codes, far = plain[:count].astype(np.intp), plain[count : 2 * count], plain[2 * count :]
    steps = _STEPS[dtype.itemsize].take(codes).view(dtype)
    far_gaps, far_steps = np.flatnonzero(gaps == FAR_GAP), np.flatnonzero(steps == FAR_STEP)
    split = far_gaps.size * _GAP.itemsize
    if plain.size != 2 * count + split + far_steps.size * dtype.itemsize:
        raise ValueError(f"{plain.size} bytes for {count} groups")
    gaps[far_gaps] = _unplaned(far[:split], _GAP)
    steps[far_steps] = _unzigzag(_unplaned(far[split:], dtype))
    changed = np.cumsum(gaps)
    after = groups.take(changed)
    items = after.view(dtype)
    items += steps
    items -= dtype.type(1)
    groups[changed] = after


def _taken_out(items: Items, limit: int) -> Items:
    """All from `limit` on; it takes their place."""
    where = np.flatnonzero(items >= limit)
    taken = items[where]
    items[where] = limit
    return taken


def _codes(steps: Items) -> Bytes:
    """The steps of each group, two bits each."""
    lanes = _GROUP.itemsize // steps.itemsize
    groups = steps.astype(np.uint8).view(f"<u{lanes}")
    codes = groups.copy()
    for lane in range(1, lanes):
        codes |= groups >> 6 * lane
    return codes.astype(np.uint8)


def _steps_of_codes(dtype: np.dtype[Any]) -> Items:
    """A group of steps for each code."""
    lanes = np.arange(_GROUP.itemsize // dtype.itemsize)
    steps = np.arange(256)[:, None] >> 2 * lanes & 3
    return steps.astype(dtype).view(_GROUP)[:, 0]


_STEPS = {size: _steps_of_codes(dtype) for size, dtype in _ITEMS.items()}


def _packed(planes: Sequence[Bytes]) -> bytes:
    packer = zstandard.ZstdCompressor(compression_params=_PACKING).compressobj(size=sum(map(len, planes)))
    parts = []
    for plane in planes:
        # Planes are not alike: each gets a code of its own.
        parts += [packer.compress(plane.data), packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*parts, packer.flush()])


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


def _planes(items: Items) -> list[Bytes]:
    """All first bytes, then all second ones, …"""
    return [np.ascontiguousarray(items.view(np.uint8)[byte :: items.itemsize]) for byte in range(items.itemsize)]


def _unplaned(plain: Bytes, dtype: np.dtype[Any]) -> Items:
    items = np.empty(plain.size // dtype.itemsize, dtype)
    for byte, plane in enumerate(plain.reshape(dtype.itemsize, -1)):
        items.view(np.uint8)[byte :: dtype.itemsize] = plane
    return items


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
    stretches, at = list(_stretches(tensors)), 0
    if len(header.blocks) != len(stretches):
        raise DeltaError(
            f"the difference to version {header.version} has {len(header.blocks)} blocks, not {len(stretches)}"
        )
    for (where, info), block in zip(stretches, header.blocks, strict=True):
        yield where, info, block, payloads[at : at + block.size_bytes]
        at += block.size_bytes
    if at != len(payloads):
        raise DeltaError(f"the difference to version {header.version} has {len(payloads)} bytes of blocks, not {at}")
