"""Checks of the GPUs: driver, memory in use, links between them, torch and NCCL."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.tools.doctor.findings import Finding, error, warning
from slipstream.tools.launch.machine import QUERY_S, Gpu, this_machine

USED = ("nvidia-smi", "--query-gpu=index,memory.used,driver_version", "--format=csv,noheader,nounits")
TOPOLOGY = ("nvidia-smi", "topo", "-m")
TORCH = """
import json, torch
gpu = torch.cuda.is_available()
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpu and torch.distributed.is_nccl_available() else None
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": gpu, "nccl": nccl}))
"""
TORCH_S = 120.0
"""Time for torch's import, and the start of each GPU."""
IDLE_BYTES = 1 << 30
"""Memory that a driver and a desktop may take of a GPU."""


def gpu_findings() -> Iterator[Finding]:
    """The GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    try:
        gpus = this_machine().gpus
    except SlipstreamError as problem:
        yield error("GPUs", str(problem), "restart the driver, or the machine")
        return
    if not gpus and not named:
        yield Finding("GPUs", "none")
    elif not gpus:
        yield warning("GPUs", f"none{named}", "unset it, or name GPUs that `nvidia-smi` lists")
    else:
        names = Counter(f"{gpu.name}, {gpu.memory_bytes / 1e9:.0f} GB" for gpu in gpus)
        yield Finding("GPUs", "; ".join(f"{count} x {name}" for name, count in names.items()) + named)
        yield from used_memory(gpus, _output(USED))
        if len(gpus) > 1:
            yield links(gpus, _output(TOPOLOGY))
        yield torch_finding(*_torch())


def used_memory(gpus: Sequence[Gpu], table: str) -> Iterator[Finding]:
    """Memory that other processes hold, by the output of `USED`."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines()]
    used = {row[0]: int(row[1]) << 20 for row in rows if len(row) == 3 and row[1].isdecimal()}
    for driver in sorted({row[2] for row in rows if len(row) == 3}):
        yield Finding("driver", driver)
    for gpu in gpus:
        if used.get(gpu.id, 0) > IDLE_BYTES:
            value = f"{used[gpu.id] / 1e9:.1f} of {gpu.memory_bytes / 1e9:.0f} GB are in use"
            yield warning(f"GPU {gpu.id}", value, "end the processes that `nvidia-smi` lists, or choose other GPUs")


def links(gpus: Sequence[Gpu], matrix: str) -> Finding:
    """Links between the GPUs, by the output of `TOPOLOGY`."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", matrix)
    rows = [line.split() for line in plain.splitlines() if line.strip()]
    columns = next((row for row in rows if row[:1] == ["GPU0"] and "X" not in row), [])
    kinds = {
        (row[0], column): kind
        for row in rows
        if re.fullmatch(r"GPU\d+", row[0]) and "X" in row
        for column, kind in zip(columns, row[1:], strict=False)
    }
    chosen = [f"GPU{gpu.id}" for gpu in gpus]
    pairs = [(first, second) for index, first in enumerate(chosen) for second in chosen[index + 1 :]]
    found = {pair: kinds[pair] for pair in pairs if pair in kinds}
    if not found:
        return Finding("links", "unknown: `nvidia-smi topo -m` has no row of these GPUs")
    value = ", ".join(f"{kind} between {count} pairs" for kind, count in sorted(Counter(found.values()).items()))
    across = [pair for pair, kind in found.items() if kind == "SYS"]
    if not across:
        return Finding("links", value)
    return warning(
        "links",
        f"{value}; SYS is the way between processors, such as {across[0][0]} to {across[0][1]}",
        "give the ranks of learner.parallel.tp and cp GPUs with a closer link: gpus.learner",
    )


def torch_finding(found: dict[str, str | bool | None], problem: str) -> Finding:
    """The build of torch, and whether it uses the GPUs; `problem` is the reason why it can't be imported."""
    if problem:
        return error("torch and GPUs", problem, "install a build of torch for these GPUs")
    build = f"torch {found['torch']} for " + (f"CUDA {found['cuda']}" if found["cuda"] else "CPUs")
    if not found["gpu"]:
        remedy = "update the driver, or install a torch for an older CUDA"
        return error("torch and GPUs", f"{build} uses no GPU", remedy if found["cuda"] else "install one for CUDA")
    if found["nccl"] is None:
        return warning("torch and GPUs", f"{build}, without NCCL", "set weights.transport=shm, or install one with it")
    return Finding("torch and GPUs", f"{build}, NCCL {found['nccl']}")


def _torch() -> tuple[dict[str, str | bool | None], str]:
    """Facts that only torch knows; in a process of its own, because a context on each GPU takes memory."""
    try:
        command = [sys.executable, "-c", TORCH]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TORCH_S)
    except subprocess.TimeoutExpired:
        return {}, f"torch finds no GPU within {TORCH_S:g} s"
    if done.returncode:
        return {}, (done.stderr.strip().splitlines() or [f"torch ended with {done.returncode}"])[-1]
    return json.loads(done.stdout.splitlines()[-1]), ""


def _output(command: Sequence[str]) -> str:
    """Output of a program; empty when it fails, or does not end."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=QUERY_S).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
