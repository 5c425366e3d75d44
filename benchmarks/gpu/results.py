"""Results of the check as JSON, and the timing of calls on a device."""

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slipstream.configs.runtime.errors import SlipstreamError

OUT, WORK = Path(os.environ.get("OUT", "gpu_out")), Path(os.environ.get("GPU_CHECK_WORK", "/tmp/gpu_check"))
TINY = bool(os.environ.get("GPU_CHECK_TINY"))
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32
FAILURES = (
    SlipstreamError, RuntimeError, ImportError, TypeError, ValueError, AttributeError, AssertionError, OSError,
)  # fmt: skip
"""Of a kernel that a version of torch lacks, or that does not take these inputs."""


def save(file: str, name: str, value: object) -> None:
    """Adds a value to a file of `OUT`, and prints it."""
    path = OUT / file
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**known, name: value}, indent=1, default=str) + "\n", encoding="utf-8")
    print(f"{name}: {json.dumps(value, default=str)[:1500]}", flush=True)


def attempt(file: str, name: str, call: Callable[[], object]) -> None:
    """Saves what a call returns, or its error: one failure must not lose the rest."""
    try:
        value = call()
    except FAILURES as error:
        value = {"error": f"{type(error).__name__}: {error}"[:600]}
    save(file, name, value)
    if CUDA:
        torch.cuda.empty_cache()


def synchronise() -> None:
    """Waits for the device."""
    if CUDA:
        torch.cuda.synchronize()


def median_s(call: Callable[[], Any], rounds: int = 5, warm_up: int = 2) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(warm_up + rounds):
        synchronise()
        began = time.perf_counter()
        call()
        synchronise()
        times.append(time.perf_counter() - began)
    return statistics.median(times[warm_up:])
