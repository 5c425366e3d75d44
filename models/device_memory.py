"""Memory of a GPU that several processes use (CUDA IPC), pinned memory of the host, and sums of memory's contents.

The driver's own functions, and not PyTorch's sharing of tensors: that pairs each export with one reader, and with
`expandable_segments` it needs a system call, pidfd_getfd, that containers forbid. Nor do failures of the driver's
functions stay behind as an error of the next kernel. Source: CUDA Driver API, "Memory Management".
"""

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slipstream.configs.runtime.errors import SlipstreamError

_HANDLE_BYTES = 64
_OUT_OF_MEMORY = 2
_LAZY_PEER_ACCESS = 1
_PORTABLE = 1
"""Pinned for all contexts."""


class DeviceMemoryError(SlipstreamError):
    """The driver refused a request."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


_Address = ctypes.c_uint64
_SIGNATURES: dict[str, list[Any]] = {
    "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int],
    "cuCtxPushCurrent_v2": [ctypes.c_void_p],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(ctypes.c_void_p)],
    "cuMemAlloc_v2": [ctypes.POINTER(_Address), ctypes.c_size_t],
    "cuMemFree_v2": [_Address],
    "cuIpcGetMemHandle": [ctypes.POINTER(_Handle), _Address],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(_Address), _Handle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [_Address],
    "cuMemHostRegister_v2": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint],
    "cuMemHostUnregister": [ctypes.c_void_p],
}


@cache
def _driver() -> Any:
    """Raises: DeviceMemoryError where there is no driver, or a very old one."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
    except (OSError, AttributeError) as error:
        raise DeviceMemoryError(f"the CUDA driver can't be used: {error}") from None
    return library


def _call(name: str, *arguments: object) -> None:
    """Raises: DeviceMemoryError; torch.OutOfMemoryError when the GPU has no room."""
    driver = _driver()
    code = getattr(driver, name)(*arguments)
    if not code:
        return
    text = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(text))
    reason = f"{name}: {(text.value or b'').decode() or code}"
    if code == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(reason)
    raise DeviceMemoryError(reason)


@cache
def _primary_context(index: int) -> ctypes.c_void_p:
    """PyTorch's context on a device; kept as long as the process lives."""
    torch.cuda.init()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


@contextmanager
def _on(index: int) -> Iterator[None]:
    """Makes the context current in this thread, which may be new."""
    _call("cuCtxPushCurrent_v2", _primary_context(index))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class _Memory:
    """Memory of a device for `torch.as_tensor`, which keeps this object as long as a tensor uses the memory."""

    def __init__(self, address: int, size_bytes: int, index: int, free: str) -> None:
        """`free`: the function that frees it."""
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
        # Not at the interpreter's exit: the driver frees all memory of a process.
        weakref.finalize(self, _release, free, address, index).atexit = False


def _release(free: str, address: int, index: int) -> None:
    with _on(index):
        _call(free, _Address(address))


def export_memory(size_bytes: int, device: torch.device) -> tuple[Tensor, bytes]:
    """Memory of a GPU, uint8, and a handle by which other processes open it; freed with its last tensor.

    It does not come from PyTorch's allocator, whose cache is emptied to make room.

    Raises: torch.OutOfMemoryError; DeviceMemoryError where processes can't share memory, as on parts of GPUs (MIG).
    """
    index, address, handle = _index(device), _Address(), _Handle()
    torch.cuda.empty_cache()
    with _on(index):
        _call("cuMemAlloc_v2", ctypes.byref(address), max(1, size_bytes))
    memory = _Memory(address.value, size_bytes, index, "cuMemFree_v2")
    with _on(index):
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return torch.as_tensor(memory, device=device), bytes(handle)


def open_memory(handle: bytes, size_bytes: int, device: torch.device) -> Tensor:
    """The memory that another process exported on the same GPU, uint8; closed with its last tensor.

    Raises: DeviceMemoryError when it is gone, or this process may not open it.
    """
    index, address = _index(device), _Address()
    if len(handle) != _HANDLE_BYTES:
        raise DeviceMemoryError(f"a handle of memory has {_HANDLE_BYTES} bytes, not {len(handle)}")
    with _on(index):
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
    return torch.as_tensor(_Memory(address.value, size_bytes, index, "cuIpcCloseMemHandle"), device=device)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def gpu_id(device: torch.device) -> str:
    """Identity of a GPU in all processes, whatever CUDA_VISIBLE_DEVICES numbers it there; empty for a CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""


def pin(memory: Tensor) -> None:
    """Pins memory of the host as long as the tensor lives, so that a GPU copies at full speed and beside other work.

    PyTorch's pinned memory has a power of two as its size. Where the driver refuses, copies are slower and that is all.
    """
    if not memory.numel():
        return
    index, address = torch.cuda.current_device(), memory.data_ptr()
    try:
        with _on(index):
            _call("cuMemHostRegister_v2", address, memory.nbytes, _PORTABLE)
    except (DeviceMemoryError, torch.OutOfMemoryError):
        return
    weakref.finalize(memory, _unpin, address, index).atexit = False


def _unpin(address: int, index: int) -> None:
    with _on(index):
        _call("cuMemHostUnregister", address)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # One for all: the allocator keeps what was freed on each stream for that stream.
    return torch.cuda.Stream(device)


def beside(device: torch.device) -> AbstractContextManager[Any]:
    """Context whose work on a GPU goes beside that of other threads; without effect on a CPU."""
    return torch.cuda.stream(_side_stream(device)) if device.type == "cuda" else nullcontext()


def after(device: torch.device) -> torch.cuda.Event | None:
    """An event after the work of the current stream so far; None on a CPU, which has done it."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def sums_by_bucket(data: Tensor, bucket_bytes: int) -> list[int]:
    """Sum of each bucket's words of 8 bytes, each times an odd number that depends on its place, modulo 2^64.

    Computed where the bytes lie: it reveals lost and mixed bytes, and is no signature. Returns once it is computed.

    Args:
        data: uint8, its size a multiple of 8 bytes.
    """
    words = data.view(torch.int64)
    if not len(words):
        return []
    step = max(1, bucket_bytes // words.itemsize)
    factors = torch.arange(1, 2 * min(step, len(words)), 2, device=data.device)
    sums = [(bucket * factors[: len(bucket)]).sum() for bucket in words.split(step)]
    found: list[int] = torch.stack(sums).tolist()
    return found
