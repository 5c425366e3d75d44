"""This machine's processor, and the precision in which it computes fastest."""

import os
import platform
from functools import cache
from pathlib import Path
from typing import Literal

Dtype = Literal["float32", "bfloat16"]

_GPUS = ("nvidia[0-9]*", "kfd")
_NO_GPU = ("", "-1")
_MATRIX_UNIT = "amx_bf16"


@cache
def fastest_dtype() -> Dtype:
    """bfloat16 with a GPU or a CPU with AMX, else float32: other CPUs, also with avx512_bf16, compute that faster."""
    return "bfloat16" if _sees_gpu() or _has_matrix_unit() else "float32"


def processor_name() -> str:
    """Model of the processor; its architecture where the kernel does not give one."""
    names = (line.partition(":")[2].strip() for line in _processor_lines() if line.startswith("model name"))
    return next(names, platform.machine())


def _sees_gpu() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in _NO_GPU:
        return False
    return any(True for pattern in _GPUS for _ in Path("/dev").glob(pattern))


def _has_matrix_unit() -> bool:
    return any(_MATRIX_UNIT in line.split() for line in _processor_lines())


def _processor_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # another system than Linux
        return []
