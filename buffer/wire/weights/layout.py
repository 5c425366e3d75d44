"""A version's tensors as bytes: their order in one buffer, buckets, checksums, safetensors files and shared memory.

Files are read without mapping: a mapped file that vanishes on a network file system kills the process, a read fails
with an error. Format: https://github.com/huggingface/safetensors#format
"""

import fcntl
import os
import secrets
import socket
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
from slipstream.configs.runtime.logging import get_log

ALIGNMENT_BYTES = 16
GLOO_BUCKET_BYTES = 16 << 20
"""Maximal bytes of one gloo broadcast: shorter than other buckets, because several are in flight."""
GLOO_BUCKETS_AT_ONCE = 2
"""With one at a time, gloo's threads, the kernel and both processes would wait for each other."""
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_LEAD = struct.Struct("<Q")


def layout(tensors: Sequence[TensorInfo]) -> tuple[list[int], int]:
    """Offset of each tensor in the byte buffer of a version, and the buffer's size in bytes."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end


def gloo_buckets(size_bytes: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """Start and end of each of gloo's broadcasts in that buffer; all ranks must agree."""
    step = min(bucket_bytes, GLOO_BUCKET_BYTES)
    return [(start, min(size_bytes, start + step)) for start in range(0, size_bytes, step)]


def tensor_buckets(tensors: Sequence[TensorInfo], bucket_bytes: int) -> list[list[TensorInfo]]:
    """Buckets of whole tensors in their order, without gaps: as many as fit, at least one each.

    Each tensor starts at a multiple of its item size.
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


def tensor_slices(data: Any, tensors: Sequence[TensorInfo]) -> Iterator[tuple[TensorInfo, Any]]:
    """Each tensor and its slice of a buffer that `layout` orders."""
    for info, offset in zip(tensors, layout(tensors)[0], strict=True):
        yield info, data[offset : offset + info.size_bytes]


class TensorFileError(SlipstreamError):
    """A file does not hold the expected version."""


def tensor_pieces(version: int, tensors: Sequence[TensorInfo], data: memoryview) -> Iterable[bytes | memoryview]:
    """Pieces of a safetensors file with a version's bytes, which `layout` orders in `data`."""
    yield _header(version, tensors)
    for _, part in tensor_slices(data, tensors):
        yield part


def read_tensors(path: Path, version: int, tensors: Sequence[TensorInfo], into: memoryview) -> None:
    """Reads a file made by `tensor_pieces` into `into`, ordered by `layout`. Raises: OSError, TensorFileError."""
    header = _header(version, tensors)
    with path.open("rb", buffering=0) as file:
        if file.read(len(header)) != header:
            raise TensorFileError(f"{path} does not hold version {version} of these {len(tensors)} tensors")
        for _, part in tensor_slices(into, tensors):
            read_exactly(file, part)
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
    """The file up to its first tensor; both sides derive the same bytes from the version's tensors."""
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
"""Below this size, passing the bytes to another thread takes longer than hashing them."""

PIECE_BYTES = 1 << 19
"""Small enough to be hashed while it is in the processor's cache."""

# Threads start with the first use. xxhash releases the GIL.
_threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="checksums")


class Checksums:
    """xxh3 (64 bits) of each tensor in a byte buffer that `layout` orders."""

    def __init__(self, data: memoryview, tensors: Sequence[TensorInfo]) -> None:
        offsets, _ = layout(tensors)
        self._places = [
            slice(offset, offset + tensor.size_bytes) for offset, tensor in zip(offsets, tensors, strict=True)
        ]
        self._data = data
        self._started = 0
        self._found: dict[int, Future[int]] = {}

    def arrived(self, end: int) -> None:
        """The bytes before `end` are complete and final."""
        for number in self._next_tensors(end):
            self._found[number] = _checksum(self._data[self._places[number]])

    def copied(self, source: memoryview) -> None:
        """Copies all bytes from memory of the same layout, several tensors at a time."""
        for number in self._next_tensors(len(self._data)):
            into, out_of = (np.frombuffer(each[self._places[number]], np.uint8) for each in (self._data, source))
            self._found[number] = _threads.submit(_copy, into, out_of)

    def all(self) -> list[int]:
        """Checksums of all tensors, in their order, once all bytes are complete."""
        self.arrived(len(self._data))
        return [self._found[number].result() for number in range(len(self._places))]

    def _next_tensors(self, end: int) -> list[int]:
        """Indices of tensors before `end` that are not hashed yet; large ones first, or the last would delay all."""
        first = self._started
        while self._started < len(self._places) and self._places[self._started].stop <= end:
            self._started += 1
        return sorted(range(first, self._started), key=self._size, reverse=True)

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
        np.copyto(piece, source[start : start + PIECE_BYTES])  # releases the GIL, unlike a memoryview
        checksum.update(piece.data)
    return checksum.intdigest()


log = get_log("wire.segments")

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "slipstream"


class SegmentError(SlipstreamError):
    """There is no shared memory, or not enough."""


class Segment:
    """A file of `size_bytes` in shared memory, removed by `close`, or once its owner is dead by the next that is made.

    Its owner holds a lock on it, which ends with the process, however that ends.
    """

    def __init__(self, run: str, size_bytes: int, *, folder: Path = SHARED_MEMORY) -> None:
        """Frees what the dead have left, too. Raises: SegmentError when the memory can't be had."""
        sweep(folder)
        # Not by the process's number alone: containers that share the memory may count alike.
        self.path = folder / f"{_PREFIX}-{run}-{os.getpid()}-{secrets.token_hex(4)}"
        unnamed = self.path.with_name(f".{self.path.name}")
        try:
            # Named once it is locked: another's sweep would take it for a dead one's.
            self._file = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unnamed.rename(self.path)
        except OSError as error:
            raise SegmentError(f"no shared memory at {folder}: {error.strerror}") from None
        try:
            # Reserved at once: a page that can't be had later would end the process with SIGBUS.
            os.posix_fallocate(self._file, 0, max(1, size_bytes))
        except OSError as error:
            self.close()
            free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
            raise SegmentError(
                f"{folder} on {socket.gethostname()} can't hold {size_bytes / 1e6:.0f} MB of weights "
                f"({free / 1e6:.0f} MB are free: {error.strerror}); enlarge it (Docker: shm_size)"
            ) from None

    def close(self) -> None:
        """Removes the file; who has mapped it keeps its memory."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)


def sweep(folder: Path = SHARED_MEMORY) -> list[Path]:
    """Removes the segments whose owners are dead, of whatever run, and returns them."""
    removed = []
    for path in folder.glob(f"{_PREFIX}-*"):
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:
            continue  # gone meanwhile, or another user's
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(file)
    if removed:
        log.info("shared memory of a dead process freed", segments=[path.name for path in removed])
    return removed


def host_identity() -> str:
    """Identity of the host: equal for two processes that share memory (one machine, no container between them)."""
    if not SHARED_MEMORY.is_dir():
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{SHARED_MEMORY.stat().st_dev}"
