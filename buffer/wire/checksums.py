"""Checksums of tensors' bytes, taken by other threads while further bytes arrive."""

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import xxhash
from numpy.typing import NDArray

from slipstream.buffer.wire.weights import TensorInfo, layout

SMALL_BYTES = 1 << 20
"""Handing less to another thread takes longer than hashing it."""

PIECE_BYTES = 1 << 20
"""Hashed while it is still in the processor's cache."""

# Threads start with the first use. xxhash lets others run meanwhile.
_threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="checksums")


class Checksums:
    """xxh3 (64 bits) of each tensor in a byte buffer that `layout` orders."""

    def __init__(self, data: memoryview, tensors: Sequence[TensorInfo]) -> None:
        offsets, _ = layout(tensors)
        ends = [offset + tensor.size_bytes for offset, tensor in zip(offsets, tensors, strict=True)]
        self._to_come = deque(zip(offsets, ends, strict=True))
        self._data = data
        self._found: list[Future[int]] = []

    def arrived(self, end: int) -> None:
        """The bytes before `end` are there and stay as they are."""
        while self._to_come and self._to_come[0][1] <= end:
            start, stop = self._to_come.popleft()
            self._found.append(_checksum(self._data[start:stop]))

    def copied(self, source: memoryview) -> None:
        """Copies all bytes from memory of the same layout, several tensors at a time."""
        while self._to_come:
            start, stop = self._to_come.popleft()
            into, out_of = (np.frombuffer(each[start:stop], np.uint8) for each in (self._data, source))
            self._found.append(_threads.submit(_copy, into, out_of))

    def all(self) -> list[int]:
        """Everything is there: the checksums, in the tensors' order."""
        self.arrived(len(self._data))
        return [found.result() for found in self._found]


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
