"""Versions as safetensors files, read without mapping them.

A mapped file that vanishes on a network file system ends the process that reads it; a read fails with an error.
Format: https://github.com/huggingface/safetensors#format
"""

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slipstream.buffer.wire.weights import TensorInfo, layout
from slipstream.configs.errors import SlipstreamError

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_LEAD = struct.Struct("<Q")


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
