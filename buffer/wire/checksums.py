"""Checksums of tensors' bytes, taken by other threads while further bytes arrive."""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import xxhash
from numpy.typing import NDArray

from slipstream.buffer.wire.weights import TensorInfo, layout

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
