"""Lossless difference between the bytes of two versions: below one percent of a bfloat16 model at small steps.

Frame: xxh3 (64 bits) of the rest · length of the header (32 bits) · header (msgpack) · payloads of the blocks.

A block is a range of one tensor, split into words of 8 bytes, and each word into unsigned integers of the tensor's item
size. An optimizer step moves a number by few units in the last place, so these integers differ by little. A payload
has, for each changed word, one byte with the gap to the changed word before it, and two bits for each item: one less,
the same, one more, or an escape code. The escaped gaps and differences follow as byte planes, differences in zigzag
code (0, -1, 1, -2, … as 0, 1, 2, 3, …), so that the upper planes are mostly zeros. zstd compresses the payload.

A difference that is applied to other bytes than its base is detected by the checksums in a version's manifest.
"""

import math
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
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
"""Kinds of blocks: no change; changed words; the new bytes as they are."""
BLOCK_BYTES = 4 << 20
"""Measured: half of it gives larger frames, twice of it takes longer in float32."""
FAR_GAP = 255
"""Escape code of a gap: this or more."""
FAR_STEP = 3
"""Escape code of a step, which is a difference plus one: steps 0, 1 and 2 have codes of their own."""
_LEAD = struct.Struct("<QI")
_WORD = np.dtype("<u8")
_GAP = np.dtype("<u4")
_ITEMS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
# Only zeros repeat: a longer search for matches costs time and finds random ones that save nothing.
_COMPRESSION = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=8, window_log=17
)
# numpy and zstd release the GIL on large arrays. Kept: glibc leaves what threads have freed in arenas of their own.
_threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="delta")


class DeltaError(SlipstreamError):
    """A difference is damaged, or has another base than the version that is held."""


class Block(Record, frozen=True):
    """Header entry of one block."""

    kind: int
    size_bytes: int
    """Size of its payload."""
    changed: int
    """Number of changed words."""


class Header(Record, frozen=True):
    """Header of a frame."""

    base: int
    version: int
    sizes: list[int]
    """Size of each tensor in bytes."""
    blocks: list[Block]
    """One for each BLOCK_BYTES of each tensor, in the order of the tensors."""


def encode(old: Bytes, new: Bytes, tensors: Sequence[TensorInfo], *, base: int, version: int) -> bytes:
    """Frame with the difference from `old`, the bytes of `base`, to `new`, those of `version`, both as in `layout`."""
    coded = list(_threads.map(lambda each: _encode_block(old, new, *each), _ranges(tensors)))
    blocks, payloads = [block for block, _ in coded], [payload for _, payload in coded]
    sizes = [info.size_bytes for info in tensors]
    header = msgspec.msgpack.encode(Header(base=base, version=version, sizes=sizes, blocks=blocks))
    rest = b"".join([struct.pack("<I", len(header)), header, *payloads])
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(rest)) + rest


def apply(delta: bytes | bytearray | memoryview, data: Bytes, tensors: Sequence[TensorInfo], *, held: int) -> None:
    """Changes `data`, the bytes of version `held`, into the new version, in place.

    Raises: DeltaError for damage, other sizes or another base, before `data` is changed. Wrong bytes under the right
    version number are not detected here: the result is wrong too.
    """
    header, payloads = _parse_frame(memoryview(delta))
    if header.base != held:
        raise DeltaError(
            f"the difference from version {header.base} to {header.version} can't be applied to version {held}"
        )
    if header.sizes != [info.size_bytes for info in tensors] or data.size != layout(tensors)[1]:
        raise DeltaError(f"the difference to version {header.version} is one between other tensors")
    blocks = list(_placed_blocks(header, tensors, payloads))
    applying = [_threads.submit(_apply_block, data, *block) for block in blocks]
    wait(applying)  # also after an error: the others still change `data`
    try:
        for applied in applying:
            applied.result()
    except (zstandard.ZstdError, ValueError, IndexError) as error:
        raise DeltaError(f"the difference to version {header.version} is malformed: {error}") from None


def _ranges(tensors: Sequence[TensorInfo]) -> Iterator[tuple[slice, TensorInfo]]:
    for info, offset in zip(tensors, layout(tensors)[0], strict=True):
        end = offset + math.ceil(info.size_bytes / _WORD.itemsize) * _WORD.itemsize  # `layout` pads tensors to this
        for start in range(offset, end, BLOCK_BYTES):
            yield slice(start, min(start + BLOCK_BYTES, end)), info


# --- blocks -----------------------------------------------------------------------------------------------------------


def _encode_block(old: Bytes, new: Bytes, where: slice, info: TensorInfo) -> tuple[Block, bytes]:
    dtype = _ITEMS[info.item_bytes]
    before, after = old[where].view(_WORD), new[where].view(_WORD)
    changed = np.flatnonzero(before != after)
    if changed.size == 0:
        return Block(kind=SAME, size_bytes=0, changed=0), b""
    gaps = np.diff(changed.astype(_GAP), prepend=_GAP.type(0))
    steps = after.take(changed).view(dtype) - before.take(changed).view(dtype) + dtype.type(1)
    far_gaps, far_steps = _extract_escaped(gaps, FAR_GAP), _extract_escaped(steps, FAR_STEP)
    planes = [gaps.astype(np.uint8), _codes(steps), *_split_planes(far_gaps), *_split_planes(_zigzag(far_steps))]
    kind, payload = CHANGED, _compress(planes)
    if len(payload) >= after.nbytes:
        kind, payload = FULL, after.tobytes()
    return Block(kind=kind, size_bytes=len(payload), changed=changed.size), payload


def _apply_block(data: Bytes, where: slice, info: TensorInfo, block: Block, payload: memoryview) -> None:
    """Raises: ValueError, IndexError, ZstdError."""
    words = data[where].view(_WORD)
    if block.kind == CHANGED:
        _apply_changes(words, _ITEMS[info.item_bytes], _decompress(payload, at_most=14 * words.size), block.changed)
    elif block.kind == FULL:
        words[:] = np.frombuffer(payload, _WORD)
    elif block.kind != SAME or payload:
        raise ValueError(f"a block of kind {block.kind} with {len(payload)} bytes")


def _apply_changes(words: Items, dtype: np.dtype[Any], plain: Bytes, count: int) -> None:
    """Raises: ValueError, IndexError."""
    gaps, codes, far = plain[:count].astype(np.intp), plain[count : 2 * count], plain[2 * count :]
    steps = _STEPS[dtype.itemsize].take(codes).view(dtype)
    far_gaps, far_steps = np.flatnonzero(gaps == FAR_GAP), np.flatnonzero(steps == FAR_STEP)
    split = far_gaps.size * _GAP.itemsize
    if plain.size != 2 * count + split + far_steps.size * dtype.itemsize:
        raise ValueError(f"{plain.size} bytes for {count} changed words")
    gaps[far_gaps] = _join_planes(far[:split], _GAP)
    steps[far_steps] = _unzigzag(_join_planes(far[split:], dtype))
    changed = np.cumsum(gaps)
    after = words.take(changed)
    items = after.view(dtype)
    items += steps
    items -= dtype.type(1)
    words[changed] = after


def _extract_escaped(items: Items, limit: int) -> Items:
    """Items of at least `limit`; they are replaced by `limit` in place."""
    where = np.flatnonzero(items >= limit)
    taken = items[where]
    items[where] = limit
    return taken


def _codes(steps: Items) -> Bytes:
    """Codes of the steps of each word, two bits each."""
    lanes = _WORD.itemsize // steps.itemsize
    words = steps.astype(np.uint8).view(f"<u{lanes}")
    codes = words.copy()
    for lane in range(1, lanes):
        codes |= words >> 6 * lane
    return codes.astype(np.uint8)


def _step_table(dtype: np.dtype[Any]) -> Items:
    """Table of the word of steps for each code."""
    lanes = np.arange(_WORD.itemsize // dtype.itemsize)
    steps = np.arange(256)[:, None] >> 2 * lanes & 3
    return steps.astype(dtype).view(_WORD)[:, 0]


_STEPS = {size: _step_table(dtype) for size, dtype in _ITEMS.items()}


def _compress(planes: Sequence[Bytes]) -> bytes:
    compressor = zstandard.ZstdCompressor(compression_params=_COMPRESSION).compressobj(size=sum(map(len, planes)))
    parts = []
    for plane in planes:
        # Planes differ in their statistics: each gets an entropy code of its own.
        parts += [compressor.compress(plane.data), compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*parts, compressor.flush()])


def _decompress(payload: memoryview, *, at_most: int) -> Bytes:
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


def _split_planes(items: Items) -> list[Bytes]:
    """Byte planes: all first bytes, all second bytes, …"""
    return [np.ascontiguousarray(items.view(np.uint8)[byte :: items.itemsize]) for byte in range(items.itemsize)]


def _join_planes(plain: Bytes, dtype: np.dtype[Any]) -> Items:
    items = np.empty(plain.size // dtype.itemsize, dtype)
    for byte, plane in enumerate(plain.reshape(dtype.itemsize, -1)):
        items.view(np.uint8)[byte :: dtype.itemsize] = plane
    return items


# --- frames -----------------------------------------------------------------------------------------------------------


def _parse_frame(frame: memoryview) -> tuple[Header, memoryview]:
    """Header and payloads. Raises: DeltaError when the frame is damaged."""
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


def _placed_blocks(
    header: Header, tensors: Sequence[TensorInfo], payloads: memoryview
) -> Iterator[tuple[slice, TensorInfo, Block, memoryview]]:
    """Each block with its place and payload. Raises: DeltaError."""
    ranges, at = list(_ranges(tensors)), 0
    if len(header.blocks) != len(ranges):
        raise DeltaError(
            f"the difference to version {header.version} has {len(header.blocks)} blocks, not {len(ranges)}"
        )
    for (where, info), block in zip(ranges, header.blocks, strict=True):
        yield where, info, block, payloads[at : at + block.size_bytes]
        at += block.size_bytes
    if at != len(payloads):
        raise DeltaError(f"the difference to version {header.version} has {len(payloads)} bytes of blocks, not {at}")
