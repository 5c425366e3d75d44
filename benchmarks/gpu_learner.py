"""A learner's step on a GPU: `python -m benchmarks.gpu_learner --json out.json`.

Random weights in published shapes: share of the GPU's measured matrix speed (MFU), and peak memory beside what
`slipstream fit` computes. A shape that fails is reported with its reason, and the others are measured.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.configs.runtime.logging import configure_logging
from benchmarks.__main__ import run_script
from benchmarks.figures import Figure, Figures, Goal
from benchmarks.fit import MODEL, expected_peak
from benchmarks.shape_step import Case, Result, run_case, shape, write_model
from benchmarks.workers import Stopped, Workers
from slipstream.tools.cli import at_least

TINY = "tiny"
"""A shape for trying the bench itself on a CPU."""
SHAPES = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-8B")
UTILISATION = {"Qwen3-1.7B": Goal(">=", 0.45)}
MASTER_BYTES = 16
"""Of a weight in fp32 with gradient and AdamW's averages."""
HELD_SHARE = 0.8
"""Of a GPU's memory for these; beyond it they are kept on the host (`learner.offload`)."""


def measure(argv: Sequence[str]) -> None:
    """Measures, prints and saves all figures, also when some could not be measured.

    Raises: ConfigError without a GPU for a published shape, Stopped, SlipstreamError when a shape failed.
    """
    arguments = _parser().parse_args(argv)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and set(arguments.shapes) != {TINY}:
        raise ConfigError("gpu_learner needs a CUDA device; --shapes tiny needs none")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    configure_logging("bench", level="warning", folder=None)
    figures, details, failed = Figures(), dict[str, Any](), []
    for name in arguments.shapes:
        try:
            measured, details[name] = _measure(name, arguments, on_gpu=on_gpu)
        except Stopped:
            raise
        except SlipstreamError as error:
            print(f"not measured: {name}: {error}", file=sys.stderr, flush=True)
            details[name] = {"error": str(error)}
            failed.append(name)
        else:
            figures.show(measured)
    machine: dict[str, Any] = {"packages": {package: version(package) for package in ("torch", "transformers")}}
    if on_gpu:
        device = torch.cuda.get_device_properties(0)
        machine |= {"device": device.name, "memory_bytes": device.total_memory}
    figures.save(arguments.json, settings=vars(arguments), details=details, machine=machine)
    if failed:
        raise SlipstreamError(f"not measured, for the reasons above: {'; '.join(failed)}")


def _measure(name: str, arguments: argparse.Namespace, *, on_gpu: bool) -> tuple[list[Figure], dict[str, Any]]:
    """The figures of a shape, in a process of its own, which leaves the GPU's whole memory to the next."""
    with Workers.start() as workers:
        config = dict(MODEL) if name == TINY else shape(name)
        dtype = "bfloat16" if on_gpu else "float32"
        model = write_model(config, workers.folder / "model", dtype=dtype, device="cuda" if on_gpu else "cpu")
        if on_gpu:
            torch.cuda.empty_cache()
        case = Case(
            model=str(model),
            lengths=[arguments.tokens] * arguments.micro_batches,
            token_budget=arguments.tokens,
            dtype=dtype,
            checkpointing=arguments.activation_checkpointing,
            optimizer=arguments.optimizer,
            offload=on_gpu and _too_large(model, arguments.optimizer),
            compile=arguments.compile,
            steps=arguments.steps,
        )
        result = run_case(workers, case, ranks=1)
        expected = expected_peak(case, model, ranks=1)
    return list(_figures(name, case, result, sum(expected.values()))), {
        "case": asdict(case),
        "measured": asdict(result),
        "computed": expected,
    }


def _too_large(model: Path, optimizer: str) -> bool:
    """True if weights, gradients and optimizer leave too little of the first GPU's memory."""
    size = sum(file.stat().st_size for file in model.glob("*.safetensors")) / torch.bfloat16.itemsize
    held = MASTER_BYTES if optimizer == "adamw" else MASTER_BYTES - 4
    return size * held > HELD_SHARE * torch.cuda.get_device_properties(0).total_memory


def _figures(name: str, case: Case, result: Result, expected: float) -> "Sequence[Figure]":
    title = f"{name}, {case.token_budget:,} tokens" + (", offloaded" if case.offload else "")
    return [
        Figure(f"{title}: utilisation (MFU)", result.utilisation, "", UTILISATION.get(name)),
        Figure("  matrix product", result.matrix_flops_per_s / 1e12, "TFLOP/s"),
        Figure("  speed", result.tokens / result.step_s, "tokens/s"),
        Figure("  peak memory", result.peak_bytes / 1e9, "GB"),
        Figure("  peak memory, computed / measured", expected / result.peak_bytes, ""),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_learner", description="Measure a learner's step on a GPU."
    )
    add, positive = parser.add_argument, at_least(1)
    add("--json", type=Path, required=True, help="file for all figures")
    add("--shapes", nargs="+", choices=[*SHAPES, TINY], default=SHAPES, help="models (default: all but tiny)")
    add("--tokens", type=at_least(16), default=8192, help="of an answer and of a micro-batch (default: 8192)")
    add("--micro-batches", type=positive, default=8, help="of a step (default: 8)")
    add("--steps", type=positive, default=3, help="measured steps, after a short one (default: 3)")
    add("--activation-checkpointing", choices=["none", "selective", "full"], default="selective")
    add("--optimizer", choices=["adamw", "adamw_8bit", "muon"], default="adamw")
    add("--compile", action="store_true", help="compile each layer")
    return parser


if __name__ == "__main__":
    run_script(measure)
