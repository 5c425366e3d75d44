"""Speed of transports, time until servers apply a version, stall of generation."""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import Figures
from benchmarks.weights_learner import QWEN3_0_6B, SMALL, TINY, Shape
from benchmarks.weights_transfer import transfers
from benchmarks.weights_updates import Case, generation, publications
from benchmarks.workers import Stopped, Workers
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.tools.cli import at_least, seconds

PUBLISHED = ("shm", "gloo", "stream")
"""Transports of the publications."""
TRANSFERS, PUBLICATIONS, GENERATION = PARTS = ("transfers", "publications", "generation")
ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {"core": "inline", "kv_cache_bytes": 256 << 20},
    "hf": {"name": "hf"},
    # vLLM requires its usual nine tenths of the memory to be free, even if it is to use less.
    "gpu": {"kv_cache_bytes": 4 << 30, "options": {"gpu_memory_utilization": 0.5}},
}
"""Keys of `rollout.engine`: two engines on CPU cores, and vLLM on a GPU."""
SMALL_POLICIES: dict[str, tuple[Shape, str]] = {"tiny": (TINY, "float32"), "small": (SMALL, "bfloat16")}
LORA, GPU = "-lora", "gpu"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The measurements."""
    add, positive = parser.add_argument, at_least(1)
    policies = [*SMALL_POLICIES, *(f"{name}{LORA}" for name in SMALL_POLICIES), GPU]
    add("--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    add("--size-mb", type=positive, default=500, help="size of a version in bfloat16")
    add("--rounds", type=positive, default=5, help="rounds of all measurements")
    add("--servers", type=positive, nargs="+", default=[1, 2, 4], help="numbers of servers")
    add("--transports", nargs="+", choices=PUBLISHED, default=PUBLISHED, help="of the publications")
    add(
        "--policies", nargs="+", choices=policies, default=["tiny", "small"],
        help="that generate; -lora: only an adapter changes; gpu: in the shape of Qwen3-0.6B, through nccl and shm",
    )  # fmt: skip
    add(
        "--model", type=Path, metavar="FOLDER",
        help="generate with this saved model in place of --policies, all of it trained and then adapters",
    )  # fmt: skip
    add("--engine", choices=["vllm", "hf"], default="vllm", help="that generates on CPU cores")
    add("--keep-stale-kv", action="store_true", help="generate with weights.keep_stale_kv")
    add("--seconds", type=seconds, default=10.0, help="of each window of generation")


def measure(options: argparse.Namespace, figures: Figures) -> dict[str, Any]:
    """Measures and shows all figures; a case of generation that fails does not stop the others.

    Raises: ConfigError without a GPU for the policy `gpu`, SlipstreamError when a process of the other parts fails.
    """
    cases = cases_of(options) if GENERATION in options.parts else []
    torch.set_num_threads(1)  # as in a learner that `slipstream up` starts: the other cores are the servers'
    details: dict[str, Any] = {}
    size_bytes, rounds = options.size_mb * 1_000_000, options.rounds
    with Workers.start() as workers:
        if TRANSFERS in options.parts:
            details[TRANSFERS] = transfers(workers, figures, size_bytes=size_bytes, rounds=rounds)
        if PUBLICATIONS in options.parts:
            details[PUBLICATIONS] = publications(
                workers,
                figures,
                size_bytes=size_bytes,
                servers=sorted(set(options.servers)),
                transports=options.transports,
                rounds=rounds,
            )
    for case in cases:
        try:
            with Workers.start() as workers:
                details[case.title] = generation(workers, figures, case, rounds=rounds, seconds=options.seconds)
        except Stopped:
            raise
        except (SlipstreamError, torch.OutOfMemoryError) as error:
            figures.fail(case.title, error)
    return details


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The policies and engines to measure. Raises: ConfigError without a GPU for the policy `gpu`."""
    if options.model is not None:
        policies = [(options.model.name, options.model, "bfloat16", lora) for lora in (False, True)]
    else:
        small = [name for name in options.policies if name != GPU]
        bases = [name.removesuffix(LORA) for name in small]
        policies = [(base, *SMALL_POLICIES[base], base != name) for name, base in zip(small, bases, strict=True)]
    cases = [
        Case(
            title=f"{options.engine}, {name}{', LoRA' if lora else ''}",
            policy=policy,
            dtype=dtype,
            engine=ENGINES[options.engine],
            lora={} if lora else None,
        )
        for name, policy, dtype, lora in policies
    ]
    if GPU in options.policies:
        cases += gpu_cases()
    if options.keep_stale_kv:
        cases = [replace(case, title=f"{case.title}, KV cache kept", keep_stale_kv=True) for case in cases]
    return cases


def gpu_cases() -> list[Case]:
    """vLLM on the first GPU and the learner's policy on the second one, or on the same: a case for each transport."""
    if not torch.cuda.is_available():
        raise ConfigError(f"--policies {GPU} needs a CUDA device")
    several = torch.cuda.device_count() > 1
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # the driver's name of the first visible device
    return [
        Case(
            title=f"vllm, {GPU}, {transport}",
            policy=QWEN3_0_6B,
            dtype="bfloat16",
            engine=ENGINES[GPU],
            transport=transport,
            concurrency=128,
            device="cuda:1" if several else "cuda:0",
            environment={"CUDA_VISIBLE_DEVICES": first},
        )
        for transport in (("nccl", "shm") if several else ("shm",))
    ]
