"""The weight channel on GPUs: `python -m slipstream.tools.bench.gpu_weights --json out.json`.

vLLM generates in processes of its own on the first GPU; the learner's policy lies on the second, or on the same one
where there is no other. For each way that a version can take there: how long generation stands still, and how many
tokens fewer it generates with an update each second. On two GPUs that is `nccl` too; on one there is only host memory
(`shm`), and beside it the bare speed of CUDA IPC, which shares memory between processes of one GPU.

Of what fails it is said why, and what the engine printed is kept beside the figures; the rest is measured all the same.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.multiprocessing as mp

from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.configs.runtime.logging import configure_logging
from slipstream.configs.runtime.processes import raise_malloc_thresholds
from slipstream.tools.bench.figures import Figure, Figures
from slipstream.tools.bench.processes import Stopped
from slipstream.tools.bench.weights.crew import crew
from slipstream.tools.bench.weights.generation import Case, stalls
from slipstream.tools.bench.weights.policy import QWEN3_0_6B, Shape, shape_of

PACKAGES = ("torch", "vllm", "transformers")
COPIES = 20
IPC_S = 300.0
LEARNER_DEVICES = {False: "cuda:0", True: "cuda:1"}
"""By whether there is more than one."""


def measure(argv: Sequence[str]) -> None:
    """Measures, prints a line for each figure, and writes all of it, also when some of it could not be measured.

    Raises: ConfigError without a GPU, Stopped, SlipstreamError when something does not start or does not go on.
    """
    arguments = _parser().parse_args(argv)
    if not torch.cuda.is_available():
        raise ConfigError(
            "slipstream.tools.bench.gpu_weights needs a CUDA device; `slipstream bench weights` needs none"
        )
    machine = _machine()  # first: what is missing here must not cost what was measured
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.set_device(LEARNER_DEVICES[torch.cuda.device_count() > 1])
    raise_malloc_thresholds()
    configure_logging("bench", level="warning", folder=None)
    shape = QWEN3_0_6B if arguments.parameters is None else shape_of(arguments.parameters)
    parts: dict[str, Callable[[], tuple[list[Figure], dict[str, Any]]]] = {
        case.title: partial(_stalls, case, arguments) for case in _cases(shape, at_once=arguments.at_once)
    }
    parts["bare copies"] = lambda: (_memory_speeds(arguments.copy_mb << 20), {})
    figures, details, failed = Figures(), dict[str, Any](), []
    for title, part in parts.items():
        try:
            found, details[title] = part()
        except Stopped:
            raise
        except (SlipstreamError, torch.OutOfMemoryError) as error:
            print(f"not measured: {title}: {error}", file=sys.stderr, flush=True)
            details[title] = {"error": str(error)}
            failed.append(title)
        else:
            figures.show(found)
    figures.keep(arguments.json, settings=vars(arguments), details=details, machine=machine)
    if failed:
        raise SlipstreamError(f"not measured, for the reasons above: {'; '.join(failed)}")


def _stalls(case: Case, arguments: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    """As `stalls`, by processes of its own; what the engine's printed is kept if it fails. Raises: SlipstreamError."""
    with crew() as at:
        try:
            return stalls(at, case, rounds=arguments.rounds, seconds=arguments.seconds)
        except SlipstreamError as error:
            printed = at.folder / "generator.console"
            if isinstance(error, Stopped) or not printed.exists():
                raise
            kept = arguments.json.with_name(f"{arguments.json.stem}-{case.transport}.console")
            shutil.copyfile(printed, kept)
            raise SlipstreamError(f"{error}\nall that the engine printed: {kept}") from error


def _cases(shape: Shape, *, at_once: int) -> list[Case]:
    """The ways that a version can take on this machine."""
    two = torch.cuda.device_count() > 1
    transports = ["nccl", "shm"] if two else ["shm"]
    return [
        Case(
            title=f"vLLM process, {transport}",
            shape=shape,
            dtype="bfloat16",
            core="process",
            kv_cache_bytes=4 << 30,
            transport=transport,
            at_once=at_once,
            device=LEARNER_DEVICES[two],
            environment={"CUDA_VISIBLE_DEVICES": _first_device()},
            # vLLM wants its usual nine tenths of the memory to be free, even if it is told to take less.
            options={"gpu_memory_utilization": 0.5},
        )
        for transport in transports
    ]


def _first_device() -> str:
    """As the driver calls the first of the devices that this process sees."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


# --- bare speeds ------------------------------------------------------------------------------------------------------


def _memory_speeds(size_bytes: int) -> list[Figure]:
    """What any transport is bound by: copies within the GPU, to and from host memory, and between processes."""
    device = torch.empty(size_bytes, dtype=torch.uint8, device="cuda:0")
    other = torch.empty_like(device)
    pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    pageable = torch.ones(size_bytes, dtype=torch.uint8)
    pairs = {
        "copy within the GPU": (other, device),
        "GPU to pinned host memory": (pinned, device),
        "pinned host memory to GPU": (device, pinned),
        "GPU to pageable host memory": (pageable, device),
        "pageable host memory to GPU": (device, pageable),
    }
    speeds = {name: _speed(target, source) for name, (target, source) in pairs.items()}
    speeds["CUDA IPC: copy out of another process's memory"] = _ipc_speed(device)
    return [Figure(name, speed / 1e9, "GB/s") for name, speed in speeds.items()]


def _speed(target: torch.Tensor, source: torch.Tensor) -> float:
    """Bytes per second of a copy from or to a GPU, the median of many."""
    device = target.device if target.is_cuda else source.device  # which need not be the current one
    took = []
    for _ in range(COPIES):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(device)
        took.append(time.perf_counter() - started)
    return source.numel() / median(took)


def _ipc_speed(source: torch.Tensor) -> float:
    """The same, by another process that is handed the memory."""
    context = mp.get_context("spawn")
    speed = context.SimpleQueue()
    process = context.Process(target=_copy_shared, args=(source, speed), daemon=True)
    process.start()
    process.join(timeout=IPC_S)
    if process.exitcode is None:
        process.kill()
        raise SlipstreamError(f"the process that copies over CUDA IPC has not ended within {IPC_S:g} s")
    if process.exitcode != 0:
        raise SlipstreamError(f"the process that copies over CUDA IPC ended with exit code {process.exitcode}")
    found: float = speed.get()
    return found


def _copy_shared(source: torch.Tensor, speed: Any) -> None:
    speed.put(_speed(torch.empty_like(source), source))


# --- the record -------------------------------------------------------------------------------------------------------


def _machine() -> dict[str, Any]:
    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return {
        "devices": [{"name": each.name, "memory_bytes": each.total_memory} for each in devices],
        "cuda": torch.version.cuda,
        "packages": {name: version(name) for name in PACKAGES},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m slipstream.tools.bench.gpu_weights", description="Measure the weight channel on GPUs."
    )
    parser.add_argument("--json", type=Path, required=True, help="file for all figures")
    parser.add_argument("--parameters", type=int, help="size of the policy (default: that of Qwen3-0.6B)")
    parser.add_argument("--at-once", type=int, default=128, help="answers generated at a time (default: 128)")
    parser.add_argument("--rounds", type=int, default=5, help="windows without and with updates (default: 5)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each window (default: 10)")
    parser.add_argument("--copy-mb", type=int, default=1024, help="bytes of the bare copies (default: 1024)")
    return parser


def main() -> None:
    """Entry point."""
    try:
        measure(sys.argv[1:])
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
