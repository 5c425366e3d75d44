"""GPUs of this host as NVIDIA's management library (NVML) shows them: none where there is no driver."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

_MIG = "MIG-"


@dataclass(frozen=True)
class Gpu:
    """A GPU."""

    id: str
    """Its UUID, `GPU-…`; the same in all processes."""
    name: str
    memory_bytes: int


@cache
def _nvml() -> Any:
    """The library, ready for use; None where it is not installed or finds no driver."""
    try:
        library = import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    return library


def _query(function: str, *arguments: Any) -> Any:
    """The answer of one of the library's functions; None where there is none, as for what a GPU does not support."""
    library = _nvml()
    if library is None:
        return None
    try:
        return getattr(library, function)(*arguments)
    except library.NVMLError:
        return None


def visible_gpus() -> list[Gpu]:
    """GPUs that this process may use, in the order of CUDA_VISIBLE_DEVICES; no CUDA context is made for it."""
    found = []
    for index in range(_query("nvmlDeviceGetCount") or 0):
        handle = _query("nvmlDeviceGetHandleByIndex", index)
        memory = _query("nvmlDeviceGetMemoryInfo", handle)
        uuid, name = _query("nvmlDeviceGetUUID", handle), _query("nvmlDeviceGetName", handle)
        found.append(Gpu(uuid or f"GPU-{index}", name or "", 0 if memory is None else int(memory.total)))
    return chosen_gpus(found, os.environ.get("CUDA_VISIBLE_DEVICES"))


def chosen_gpus(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """The GPUs that a CUDA_VISIBLE_DEVICES leaves; None leaves all.

    Numbers are those of NVML, which CUDA's are on a host of equal GPUs. A part of a GPU (MIG) has neither name nor size
    here. Entries after an unknown one do not count, as in CUDA.
    """
    if visible is None or not gpus:
        return list(gpus)
    chosen = list[Gpu]()
    for entry in (entry.strip() for entry in visible.split(",")):
        if entry.startswith(_MIG):
            chosen.append(Gpu(entry, "", 0))
        elif entry.isdecimal() and int(entry) < len(gpus):
            chosen.append(gpus[int(entry)])
        elif entry.startswith("GPU-") and (named := [gpu for gpu in gpus if gpu.id.startswith(entry)]):
            chosen.append(named[0])
        else:
            break
    return chosen


def driver_version() -> str | None:
    """Version of the GPUs' driver; None without one."""
    version: str | None = _query("nvmlSystemGetDriverVersion")
    return version


class PowerMeter:
    """Mean power of a GPU between two readings."""

    def __init__(self, gpu_id: str) -> None:
        """`gpu_id`: its UUID; empty for a CPU, which has no readings."""
        self._handle = _query("nvmlDeviceGetHandleByUUID", gpu_id) if gpu_id else None
        self._last: tuple[float, float] | None = self._reading()

    def mean_w(self) -> float | None:
        """Mean power since the call before, or since the start, in watts; None where the GPU counts no energy."""
        before, self._last = self._last, self._reading()
        return None if before is None or self._last is None else mean_power_w(before, self._last)

    def _reading(self) -> tuple[float, float] | None:
        """Time in seconds, and energy in millijoules since the driver was loaded (from Volta on)."""
        energy = None if self._handle is None else _query("nvmlDeviceGetTotalEnergyConsumption", self._handle)
        return None if energy is None else (time.monotonic(), float(energy))


def mean_power_w(before: tuple[float, float], now: tuple[float, float]) -> float | None:
    """Mean power in watts between two readings of time (s) and energy (mJ); None where they can't give one."""
    (began, energy_mj), (ended, energy_now_mj) = before, now
    if ended <= began or energy_now_mj < energy_mj:  # a driver that is loaded anew counts from 0
        return None
    return (energy_now_mj - energy_mj) / 1000 / (ended - began)
