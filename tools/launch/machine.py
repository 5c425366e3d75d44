"""The machine that `slipstream up` divides: its cores and GPUs."""

import os
import subprocess
from dataclasses import dataclass

from slipstream.configs.runtime.errors import SlipstreamError

QUERY = ("nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits")
QUERY_S = 30.0
"""Time for an answer: without its persistence daemon the driver first starts each GPU."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use."""

    id: str
    """Its entry in CUDA_VISIBLE_DEVICES."""
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Machine:
    """Cores and GPUs that this process may use."""

    cores: tuple[int, ...]
    """Numbers of the cores."""
    gpus: tuple[Gpu, ...] = ()
    """In the order in which CUDA numbers them."""
    threads: int | None = None
    """Threads of each process, if the user has chosen their number by OMP_NUM_THREADS."""
    pins: bool = True
    """True if the platform binds processes to cores."""
    sets_allocator: bool = False
    """True if the user has configured PyTorch's allocator by its variables."""


def this_machine() -> Machine:
    """The machine, as far as this process may use it. Raises: SlipstreamError when its GPUs don't answer."""
    pins = hasattr(os, "sched_getaffinity")
    cores = sorted(os.sched_getaffinity(0)) if pins else range(os.cpu_count() or 1)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    sets_allocator = any(name in os.environ for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    return Machine(tuple(cores), _visible_gpus(), int(threads) if threads.isdecimal() else None, pins, sets_allocator)


def _visible_gpus() -> tuple[Gpu, ...]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        return ()
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, check=False, timeout=QUERY_S)
    except FileNotFoundError:
        return ()
    except subprocess.TimeoutExpired:
        raise SlipstreamError(f"`{' '.join(QUERY)}` does not end within {QUERY_S:g} s: see to the driver") from None
    return chosen_gpus(parse_gpus(answer.stdout) if answer.returncode == 0 else (), visible)


def parse_gpus(table: str) -> tuple[Gpu, ...]:
    """The GPUs in the output of `QUERY`."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines()]
    # A part of a GPU (MIG) has no memory of its own in this table.
    return tuple(Gpu(row[0], row[1], int(row[2]) << 20) for row in rows if len(row) == 3 and row[2].isdecimal())


def chosen_gpus(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES names, in its order; entries that are no numbers are taken for any of them."""
    if visible is None or not gpus:
        return gpus
    by_id, least = {gpu.id: gpu for gpu in gpus}, min(gpus, key=lambda gpu: gpu.memory_bytes)
    return tuple(
        by_id.get(entry, Gpu(entry, least.name, least.memory_bytes))
        for entry in map(str.strip, visible.split(","))
        if entry in by_id or not entry.isdecimal()
    )
