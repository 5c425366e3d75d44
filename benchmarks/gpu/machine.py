"""Versions, and the speed of matrix products and of copies."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.figures import machine
from benchmarks.gpu.results import CUDA, DEVICE, TINY, median_s, save

PACKAGES = (
    "torch triton transformers tokenizers huggingface_hub numpy safetensors pydantic pyzmq msgspec redis peft pytest"
)
SEGMENT = Path("/dev/shm/gpu_check")


def environment() -> None:
    """All of it."""
    installed = {each.name: each.version for each in metadata.distributions() if each.name in PACKAGES.split()}
    save("env.json", "versions", {**installed, "cudnn": torch.backends.cudnn.version()})
    save("env.json", "machine", {**machine(), "kernel": platform.release(), "gpu": _output("nvidia-smi")})
    size = 512 if TINY else 8192
    for dtype, rounds in ((torch.bfloat16, 10), (torch.float32, 3)):
        left, right = (torch.randn(size, size, device=DEVICE, dtype=dtype) for _ in range(2))
        seconds = median_s(lambda left=left, right=right: left @ right, rounds)  # type: ignore[misc]
        save("env.json", f"matrix {dtype} TFLOP/s", 2 * size**3 / seconds / 1e12)
    _copies((1 << 22) if TINY else (1 << 30))


def _copies(size: int) -> None:
    """GB/s between the device and kinds of host memory."""
    source, target = (torch.empty(size, dtype=torch.uint8, device=DEVICE).fill_(1) for _ in range(2))
    save("env.json", "copy on the device, GB/s", 2 * size / median_s(lambda: target.copy_(source)) / 1e9)
    host = {"pageable": torch.ones(size, dtype=torch.uint8)}
    if CUDA:
        host["pinned"] = host["pageable"].pin_memory()
    try:
        SEGMENT.write_bytes(b"")
        os.truncate(SEGMENT, size)
        host["shm"] = _segment(size).fill_(1)
        if CUDA:
            host["shm, registered"] = _segment(size)
            runtime = torch.cuda.cudart()
            code = runtime.cudaHostRegister(host["shm, registered"].data_ptr(), size, 0)
            save("env.json", "cudaHostRegister of shared memory", str(code))
        for name, memory in host.items():
            to_device = median_s(lambda memory=memory: target.copy_(memory), 3)  # type: ignore[misc]
            to_host = median_s(lambda memory=memory: memory.copy_(source), 3)  # type: ignore[misc]
            save("env.json", f"{name} to device, to host, GB/s", [size / to_device / 1e9, size / to_host / 1e9])
    except OSError as error:
        save("env.json", "shared memory", str(error))
    finally:
        SEGMENT.unlink(missing_ok=True)


def _segment(size: int) -> torch.Tensor:
    return torch.from_file(str(SEGMENT), shared=True, size=size, dtype=torch.uint8)


def _output(command: str) -> str:
    try:
        return subprocess.run([command], capture_output=True, text=True, check=False).stdout[:2500]
    except FileNotFoundError:
        return "not installed"
