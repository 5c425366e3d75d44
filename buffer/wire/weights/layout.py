"""Order of a version's tensors in one byte buffer: offsets, buckets, checksums, safetensors files.

Files are read without mapping: a mapped file that vanishes on a network file system kills the process, a read fails
with an error. Format: https://github.com/huggingface/safetensors#format
"""

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from slipstream.buffer.wire.weights.protocol import TensorInfo
from slipstream.configs.runtime.errors import SlipstreamError

ALIGNMENT_BYTES = 16
GLOO_BUCKET_BYTES = 16 << 20
"""Most bytes of one of gloo's broadcasts. They are shorter than others' buckets, because several are under way."""
GLOO_BUCKETS_AT_ONCE = 2
"""Between the buckets gloo's threads, the kernel and both processes would wait for each other."""
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_LEAD = struct.Struct("<Q")


def layout(tensors: Sequence[TensorInfo]) -> tuple[list[int], int]:
    """Where each tensor starts in the byte buffer that all of them are sent in, and the buffer's size in bytes."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end


def gloo_buckets(size_bytes: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """Where each of gloo's broadcasts begins and ends in that buffer: all ranks must cut it up alike."""
    step = min(bucket_bytes, GLOO_BUCKET_BYTES)
    return [(start, min(size_bytes, start + step)) for start in range(0, size_bytes, step)]


def tensor_buckets(tensors: Sequence[TensorInfo], bucket_bytes: int) -> list[list[TensorInfo]]:
    """Whole tensors in their order, one after the other without gaps: as many in a bucket as it has room for, and one
    at least. None begins in the middle of what would be a number of its own.
    """
    buckets: list[list[TensorInfo]] = []
    end = 0
    for tensor in tensors:
        if not buckets or end + tensor.size_bytes > bucket_bytes or end % tensor.item_bytes:
            buckets.append([])
            end = 0
        buckets[-1].append(tensor)
        end += tensor.size_bytes
    return buckets


def named_tensors(data: Any, tensors: Sequence[TensorInfo], torch: Any) -> Iterator[tuple[str, Any]]:
    """Views of the tensors in a uint8 tensor that `layout` orders, with their names; `torch` is the module."""
    for info, offset in zip(tensors, layout(tensors)[0], strict=True):
        yield info.name, data[offset : offset + info.size_bytes].view(getattr(torch, info.dtype)).view(info.shape)


class TensorFileError(SlipstreamError):
    """A file does not hold the version that it should."""


def tensor_pieces(version: int, tensors: Sequence[TensorInfo], data: memoryview) -> Iterable[bytes | memoryview]:
    """The pieces of a safetensors file with a version's bytes, which lie in `data` as `layout` orders them."""
    yield _header(version, tensors)
    for info, offset in zip(tensors, layout(tensors)[0], strict=True):
        yield data[offset : offset + info.size_bytes]


def read_tensors(path: Path, version: int, tensors: Sequence[TensorInfo], into: memoryview) -> None:
    """Reads what `tensor_pieces` made into `into`, as `layout` orders it. Raises: OSError, TensorFileError."""
    header = _header(version, tensors)
    with path.open("rb", buffering=0) as file:
        if file.read(len(header)) != header:
            raise TensorFileError(f"{path} does not hold version {version} of these {len(tensors)} tensors")
        for info, offset in zip(tensors, layout(tensors)[0], strict=True):
            read_exactly(file, into[offset : offset + info.size_bytes])
        if file.read(1):
            raise TensorFileError(f"{path} goes on after its last tensor")


def read_exactly(file: Any, into: memoryview) -> None:
    """Fills `into`. Raises: OSError, TensorFileError when the file ends before that."""
    filled = 0
    while filled < len(into):
        size = file.readinto(into[filled:])
        if not size:
            raise TensorFileError(f"{file.name} ends {len(into) - filled} bytes too early")
        filled += size


def _header(version: int, tensors: Sequence[TensorInfo]) -> bytes:
    """The file up to its first tensor: the same bytes on both sides, as they follow from what is in the version."""
    described: dict[str, Any] = {"__metadata__": {"version": str(version)}}
    start = 0
    for info in tensors:
        end = start + info.size_bytes
        described[info.name] = {"dtype": _DTYPES[info.dtype], "shape": info.shape, "data_offsets": [start, end]}
        start = end
    text = msgspec.json.encode(described)
    text += b" " * (-len(text) % 8)
    return _LEAD.pack(len(text)) + text


SMALL_BYTES = 1 << 20
"""Handing less to another thread takes longer than hashing it."""

PIECE_BYTES = 1 << 19
"""Hashed while it is still in the processor's cache."""

# Threads start with the first use. xxhash lets others run meanwhile.
_threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="checksums")


class Checksums:
    """xxh3 (64 bits) of each tensor in a byte buffer that `layout` orders."""

    def __init__(self, data: memoryview, tensors: Sequence[TensorInfo]) -> None:
        offsets, _ = layout(tensors)
        self._places = [
            slice(offset, offset + tensor.size_bytes) for offset, tensor in zip(offsets, tensors, strict=True)
        ]
        self._data = data
        self._begun = 0
        self._found: dict[int, Future[int]] = {}

    def arrived(self, end: int) -> None:
        """The bytes before `end` are there and stay as they are."""
        for number in self._to_begin(end):
            self._found[number] = _checksum(self._data[self._places[number]])

    def copied(self, source: memoryview) -> None:
        """Copies all bytes from memory of the same layout, several tensors at a time."""
        for number in self._to_begin(len(self._data)):
            into, out_of = (np.frombuffer(each[self._places[number]], np.uint8) for each in (self._data, source))
            self._found[number] = _threads.submit(_copy, into, out_of)

    def all(self) -> list[int]:
        """Everything is there: the checksums, in the tensors' order."""
        self.arrived(len(self._data))
        return [self._found[number].result() for number in range(len(self._places))]

    def _to_begin(self, end: int) -> list[int]:
        """Tensors before `end` that nobody works on yet; large ones first, or in the end all would wait for one."""
        first = self._begun
        while self._begun < len(self._places) and self._places[self._begun].stop <= end:
            self._begun += 1
        return sorted(range(first, self._begun), key=self._size, reverse=True)

    def _size(self, number: int) -> int:
        place = self._places[number]
        return place.stop - place.start


def _checksum(tensor: memoryview) -> Future[int]:
    if len(tensor) >= SMALL_BYTES:
        return _threads.submit(xxhash.xxh3_64_intdigest, tensor)
    found: Future[int] = Future()
    found.set_result(xxhash.xxh3_64_intdigest(tensor))
    return found


def _copy(into: NDArray[np.uint8], source: NDArray[np.uint8]) -> int:
    checksum = xxhash.xxh3_64()
    for start in range(0, len(into), PIECE_BYTES):
        piece = into[start : start + PIECE_BYTES]
        np.copyto(piece, source[start : start + PIECE_BYTES])  # lets other threads run, unlike a memoryview
        checksum.update(piece.data)
    return checksum.intdigest()
