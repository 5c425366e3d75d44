"""The weight channel on GPUs: `python -m slipstream.tools.bench.gpu_weights --json out.json`.

vLLM generates in processes of its own on the first GPU; the learner's policy is on the second one, or on the same. For
each transport of the machine (`nccl` between two GPUs; `shm`): the stall of generation, and the speed that it loses to
an update each second. A transport that fails is reported with its reason, and the others are measured.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.configs.runtime.logging import configure_logging
from slipstream.configs.runtime.processes import raise_malloc_thresholds
from slipstream.tools.bench.cli import run_script
from slipstream.tools.bench.figures import Figure, Figures
from slipstream.tools.bench.weights_learner import QWEN3_0_6B, Shape, shape_of
from slipstream.tools.bench.weights_updates import Case, generation
from slipstream.tools.bench.workers import Stopped, Workers

PACKAGES = ("torch", "vllm", "transformers")


def measure(argv: Sequence[str]) -> None:
    """Measures, prints and saves all figures, also when some could not be measured.

    Raises: ConfigError without a GPU, Stopped, SlipstreamError when a transport failed.
    """
    arguments = _parser().parse_args(argv)
    if not torch.cuda.is_available():
        raise ConfigError("gpu_weights needs a CUDA device; `slipstream bench weights` needs none")
    machine = _machine()  # first: a failure here must not lose measurements
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    raise_malloc_thresholds()
    configure_logging("bench", level="warning", folder=None)
    shape = QWEN3_0_6B if arguments.parameters is None else shape_of(arguments.parameters)
    figures, details, failed = Figures(), dict[str, Any](), []
    for case in _cases(shape, concurrency=arguments.concurrency):
        torch.cuda.set_device(case.device)
        try:
            measured, details[case.title] = _measure(case, arguments)
        except Stopped:
            raise
        except (SlipstreamError, torch.OutOfMemoryError) as error:
            print(f"not measured: {case.title}: {error}", file=sys.stderr, flush=True)
            details[case.title] = {"error": str(error)}
            failed.append(case.title)
        else:
            figures.show(measured)
    figures.save(arguments.json, settings=vars(arguments), details=details, machine=machine)
    if failed:
        raise SlipstreamError(f"not measured, for the reasons above: {'; '.join(failed)}")


def _measure(case: Case, arguments: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    """`generation` in processes of its own; a failed engine's output is kept. Raises: SlipstreamError."""
    with Workers.start() as workers:
        try:
            return generation(workers, case, rounds=arguments.rounds, seconds=arguments.seconds)
        except SlipstreamError:
            output = workers.folder / "generator.console"
            if output.exists():
                shutil.copyfile(output, arguments.json.with_name(f"{arguments.json.stem}-{case.transport}.console"))
            raise


def _cases(shape: Shape, *, concurrency: int) -> list[Case]:
    """One case for each transport of this machine."""
    several = torch.cuda.device_count() > 1
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # the driver's name of the first visible device
    return [
        Case(
            title=f"vLLM process, {transport}",
            policy=shape,
            dtype="bfloat16",
            # vLLM requires its usual nine tenths of the memory to be free, even if it is to use less.
            engine={"kv_cache_bytes": 4 << 30, "options": {"gpu_memory_utilization": 0.5}},
            transport=transport,
            concurrency=concurrency,
            device="cuda:1" if several else "cuda:0",
            environment={"CUDA_VISIBLE_DEVICES": first},
        )
        for transport in (("nccl", "shm") if several else ("shm",))
    ]


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
    parser.add_argument("--concurrency", type=int, default=128, help="answers generated at a time (default: 128)")
    parser.add_argument("--rounds", type=int, default=5, help="windows without and with updates (default: 5)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each window (default: 10)")
    return parser


if __name__ == "__main__":
    run_script(measure)
