"""A learner's step on random weights: speed, and peak memory beside what `slipstream fit` computes.

On a CPU a small model with several settings; on a GPU published shapes. A case that fails is reported with its reason,
and the others are measured.
"""

import argparse
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.figures import Figure, Figures, Goal
from benchmarks.step import Case, Result, qwen3, run_case, shape, write_model
from benchmarks.workers import Stopped, Workers
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.learner.models.footprint import model_size
from slipstream.learner.parallel.mesh import MeshSizes
from slipstream.tools.cli import at_least
from slipstream.tools.memory import Estimator, LearnerSetting

ERROR = Goal("<", 0.10)
UTILISATION = {"Qwen3-1.7B": Goal(">=", 0.45)}
MODEL = qwen3(vocabulary=8192, hidden=512, layers=6, heads=8, kv_heads=4)
"""26 million parameters: 105 MB in fp32."""
SHAPES = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-8B")
MASTER_BYTES = 16
"""Of a weight in fp32 with gradient and AdamW's averages."""
HELD_SHARE = 0.8
"""Of a GPU's memory for these; beyond it they are kept on the host (`learner.offload`)."""
ONE_MAP_PER_TENSOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Environment in which freed tensors go back to the system at once: resident pages are live tensors."""


@dataclass(frozen=True)
class Setting:
    """A variation of a case: other fields, longer micro-batches, more ranks."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Case`."""
    length: int = 1
    """Tokens of a micro-batch, in multiples of `--tokens`."""
    ranks: int = 1


SETTINGS = {
    "none": Setting(),
    "selective": Setting({"checkpointing": "selective"}),
    "full": Setting({"checkpointing": "full"}),
    "full-long": Setting({"checkpointing": "full"}, length=4),
    "full-muon": Setting({"checkpointing": "full", "optimizer": "muon"}),
    "full-two-ranks": Setting({"checkpointing": "full"}, ranks=2),
    **dict.fromkeys(SHAPES, Setting({"checkpointing": "selective", "steps": 3})),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The cases."""
    add, small = parser.add_argument, [name for name in SETTINGS if name not in SHAPES]
    add("--cases", nargs="+", choices=SETTINGS, default=small, help="activation checkpointing and more, or a shape")
    add("--tokens", type=at_least(16), default=2048, help="of a micro-batch")
    add("--sequences", type=at_least(1), default=4, help="of a micro-batch")
    add("--micro-batches", type=at_least(1), default=2, help="of a step; with two, the second finds gradients")


def measure(options: argparse.Namespace, figures: Figures) -> dict[str, Any]:
    """Measures and shows all figures. Raises: ConfigError without a GPU for a published shape, Stopped."""
    on_gpu = torch.cuda.is_available()
    for name in options.cases:
        if name in SHAPES and not on_gpu:
            raise ConfigError(f"--cases {name} needs a CUDA device; the small model's cases need none")
    details = {}
    for name in options.cases:
        try:
            with Workers.start() as workers:  # its end leaves the whole memory to the next case
                case, result, expected = _run(workers, name, options, on_gpu=on_gpu)
        except Stopped:
            raise
        except SlipstreamError as error:
            figures.fail(name, error)
        else:
            shown = asdict(case) | {"model": name if name in SHAPES else "small"}
            details[name] = {"case": shown, "measured": asdict(result), "computed": expected}
            figures.show(*figures_of(name, case, result, sum(expected.values())))
    return details


def _run(
    workers: Workers, name: str, options: argparse.Namespace, *, on_gpu: bool
) -> tuple[Case, Result, dict[str, float]]:
    setting = SETTINGS[name]
    dtype, device = ("bfloat16", "cuda") if on_gpu else ("float32", "cpu")
    config = shape(name) if name in SHAPES else MODEL
    model = write_model(config, workers.folder / "model", dtype=dtype, device=device)
    if on_gpu:
        torch.cuda.empty_cache()
    tokens, offload = options.tokens * setting.length, on_gpu and _too_large(model)
    case = Case(
        model=str(model),
        lengths=[tokens // options.sequences] * options.sequences * options.micro_batches * setting.ranks,
        token_budget=tokens,
        dtype=dtype,
        offload=offload,
        threads=(os.cpu_count() or 1) if offload else 1,  # the host's optimizer
        **setting.changes,
    )
    result = run_case(workers, case, ranks=setting.ranks, environment={} if on_gpu else ONE_MAP_PER_TENSOR)
    return case, result, expected_peak(case, model, ranks=setting.ranks, on_gpu=on_gpu)


def figures_of(name: str, case: Case, result: Result, expected: float) -> Iterator[Figure]:
    """Memory and speed of a case."""
    yield Figure(f"{name}, {case.token_budget:,} tokens" + (", offloaded" if case.offload else ""), result.step_s, "s")
    yield Figure("  peak memory", result.peak_bytes / 1e6, "MB")
    yield Figure("  computed", expected / 1e6, "MB")
    yield Figure("  error", abs(expected / result.peak_bytes - 1), "", ERROR)
    yield Figure("  speed", result.tokens / result.step_s, "tokens/s")
    yield Figure("  matrix product", result.matrix_flops_per_s / 1e12, "TFLOP/s")
    yield Figure("  utilisation (MFU)", result.utilisation, "", UTILISATION.get(name))


def expected_peak(case: Case, model: Path, *, ranks: int, on_gpu: bool) -> dict[str, float]:
    """Computed bytes of a rank by purpose, for the model in a folder."""
    config = AutoConfig.from_pretrained(model)
    setting = LearnerSetting(
        mesh=MeshSizes(dp_shard=ranks),
        dtype=getattr(torch, case.dtype),
        tokens=case.token_budget,
        logits_bytes=case.config(model).learner.logits_bytes,
        checkpointing=case.checkpointing,
        optimizer=case.optimizer,
        offload=case.offload,
        on_gpu=on_gpu,
    )
    return dict(Estimator(model_size(config), config).learner(setting).gpu)


def _too_large(model: Path) -> bool:
    """True if weights, gradients and optimizer leave too little of the first GPU's memory.

    Raises: ConfigError when the host has no room for them either.
    """
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) / torch.bfloat16.itemsize
    held = weights * MASTER_BYTES
    if held <= HELD_SHARE * torch.cuda.get_device_properties(0).total_memory:
        return False
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if held > HELD_SHARE * host:
        raise ConfigError(
            f"weights, gradients and optimizer take {held / 1e9:.0f} GB: too much for the GPU, and for the "
            f"{host / 1e9:.0f} GB of the host"
        )
    return True
