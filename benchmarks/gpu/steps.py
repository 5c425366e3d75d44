"""A learner's step on answers of several lengths: tokens/s, share of the GPU's peak, memory, waits for the GPU."""

import shutil
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.fit import MODEL
from benchmarks.gpu.results import CUDA, DEVICE, DTYPE, TINY, WORK, attempt, save, synchronise
from benchmarks.step import Case, matrix_flops_per_s, shape, step_data, write_model
from slipstream.learner.data.balance import SequenceCost
from slipstream.learner.models.flops import peak_flops_per_s
from slipstream.learner.models.layers import Checkpointing
from slipstream.learner.parallel.mesh import World, join_world, leave_world
from slipstream.learner.trainers.rl.parts import build_train_step
from slipstream.learner.trainers.rl.step import TrainStep

FILE = "learner.json"
STEP_TOKENS = 256 if TINY else 32_768
"""Of a step, in micro-batches of one answer each; of a longer answer, one."""
PEERS = {
    "Qwen3-0.6B, 16384": 11_900, "Qwen3-0.6B, 65536": 10_150, "Qwen3-4B with LoRA, 16384": 6_230,
}  # fmt: skip
"""Tokens/s that prime-rl publishes for one H100 (January 2026)."""
STEPS = 2


def steps(model: str, checkpointing: Checkpointing, lora_rank: str, *lengths: str) -> None:
    """Steps of one model, built once; a length that does not fit is reported, and the next one measured.

    Args:
        model: a published shape; on a CPU a small model takes its place.
        lora_rank: 0: all weights are trained.
    """
    folder = WORK / f"steps-{'tiny-' if TINY else ''}{model}"
    if not any(folder.glob("*.safetensors")):
        shutil.rmtree(folder, ignore_errors=True)
        write_model(MODEL if TINY else shape(model), folder, dtype=str(DTYPE)[6:], device=DEVICE.type)
    case = Case(
        model=str(folder), lengths=[int(lengths[0])], token_budget=int(lengths[0]), dtype=str(DTYPE)[6:],
        checkpointing=checkpointing, lora_rank=int(lora_rank) or None,
    )  # fmt: skip
    world = join_world()
    speed = matrix_flops_per_s(world.device, DTYPE)
    save(FILE, f"{model}: TFLOP/s of a matrix product", speed / 1e12)
    train_step = build_train_step(case.config(WORK), folder, world)
    name = f"{model} with LoRA" if case.lora_rank else model
    for length in map(int, lengths):
        count = max(1, STEP_TOKENS // length)
        of_length = replace(case, lengths=[length] * count, token_budget=length)
        attempt(FILE, f"{name}, {length}", lambda one=of_length: _measure(name, one, train_step, world, speed))  # type: ignore[misc]
    leave_world()


def _measure(name: str, case: Case, train_step: TrainStep, world: World, speed: float) -> dict[str, Any]:
    config, cost, length = case.config(WORK), SequenceCost.of_model(Path(case.model)), case.lengths[0]
    data = step_data(case, config, cost, world)
    first = step_data(replace(case, lengths=[length]), config, cost, world)
    train_step.run(first, unpublished_steps=0)  # compiles, plans, fills the optimizer's state
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    durations_s, figures = [], dict[str, float]()
    for _ in range(STEPS):
        synchronise()
        began = time.perf_counter()
        figures = train_step.run(data, unpublished_steps=0)
        synchronise()
        durations_s.append(time.perf_counter() - began)
    tokens_per_s = sum(case.lengths) / median(durations_s)
    flops_per_s = figures["flops"] / median(durations_s)
    result = {
        "tokens_per_s": tokens_per_s, "step_s": median(durations_s), "micro_batches": len(case.lengths),
        "mfu": _share_of_peak(flops_per_s), "share_of_matrix_product": flops_per_s / speed,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if CUDA else None, "loss": figures["loss"],
        "waits": _waits(lambda: train_step.run(data, unpublished_steps=0)) if CUDA else None,
    }  # fmt: skip
    if (peer := PEERS.get(f"{name}, {length}")) is not None:
        result["of prime-rl's tokens/s"] = tokens_per_s / peer
    return result


def _share_of_peak(flops_per_s: float) -> float | None:
    peak = peak_flops_per_s(torch.cuda.get_device_name() if CUDA else "", str(DTYPE)[6:])
    return None if peak is None else flops_per_s / peak


def _waits(call: Any) -> dict[str, int]:
    """Lines at which the host waits for the GPU during a call, and how often."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = (each for each in caught if "synchronizing" in str(each.message))
    return dict(Counter(f"{'/'.join(Path(each.filename).parts[-3:])}:{each.lineno}" for each in found).most_common(12))
