"""The model and the results of whole runs, and a learner's step on answers of mixed lengths."""

import json
import shutil
import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.fit import MODEL
from benchmarks.gpu.results import CUDA, DEVICE, DTYPE, OUT, TINY, WORK, attempt, save
from benchmarks.step import Case, run_case, shape, write_model
from benchmarks.workers import Workers
from slipstream.models.tiny import TEXT, build_model

SHAPE = "Qwen3-0.6B"
METRICS = (
    "step_s", "train_s", "wait_s", "publish_s", "weight_sync_s", "generation_stall_s", "learner_idle_fraction",
    "generator_idle_fraction", "tokens_generated_per_s", "staleness_mean", "mismatch_abs", "mismatch_k3", "tokens",
    "reward", "entropy", "grad_norm",
)  # fmt: skip
UPDATES = ("weight_sync_s", "publish_s", "generation_stall_s")
"""From publication to the last engine that generates with it; pause of training; pause of generation."""
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
LEVELS = ('"warning"', '"error"', '"critical"')


def model() -> None:
    """Writes a random model in the shape of Qwen3-0.6B, with a tokenizer of printable ASCII."""
    folder, began = WORK / "model", time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    build_model(folder, TEXT, seed=0)
    if not TINY:
        file = folder / "config.json"
        special = {name: json.loads(file.read_text(encoding="utf-8"))[name] for name in SPECIAL_TOKENS}
        file.write_text(json.dumps(shape(SHAPE) | special), encoding="utf-8")
        (folder / "built_by_slipstream.json").unlink()
        torch.manual_seed(0)
        with torch.device(DEVICE):
            made: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        made.generation_config.eos_token_id, made.generation_config.pad_token_id = (
            special["eos_token_id"], special["pad_token_id"],
        )  # fmt: skip
        made.save_pretrained(folder)
    print(f"model written in {time.perf_counter() - began:.1f} s")


def summary(name: str) -> None:
    """Saves the figures and warnings of a run, also of one that was cut off."""
    folder = WORK / "runs" / name
    file, whole = folder / "metrics.jsonl", folder / "summary.json"
    metrics = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    steps = [each for each in metrics if each["kind"] == "step"]
    late = steps[len(steps) // 4 :]
    columns = {key: [step[key] for step in late if isinstance(step.get(key), int | float)] for key in METRICS}
    medians = {key: statistics.median(values) for key, values in columns.items() if values}
    if late:
        tokens = sum(columns["tokens"])
        medians["tokens_trained_per_s"] = tokens / sum(columns["step_s"])
        medians["tokens_per_s_while_training"] = tokens / sum(columns["train_s"])
    done = json.loads(whole.read_text(encoding="utf-8")) if whole.exists() else None
    save("runs.json", name, {"steps": len(steps), "medians of the last three quarters": medians, "summary": done})
    warnings = [
        f"{log.stem}: {line[:600]}"
        for log in sorted((folder / "logs").glob("*.jsonl"))
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if any(level in line for level in LEVELS)
    ]
    save("runs.json", f"{name}: warnings", warnings[:25])
    with (OUT / "metrics.jsonl").open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"run": name, **each}) + "\n" for each in metrics)


def updates() -> None:
    """Saves the seconds of an update of the engine's weights in both runs of the pipeline, and of training's pause."""
    runs = json.loads((OUT / "runs.json").read_text(encoding="utf-8"))
    medians = {
        transport: runs.get(name, {}).get("medians of the last three quarters", {})
        for transport, name in (("ipc", "pipeline"), ("shm", "pipeline_shm"))
    }
    found = {transport: {key: values.get(key) for key in UPDATES} for transport, values in medians.items()}
    save("runs.json", "seconds of an update", found)


def lengths() -> None:
    """A learner's step on answers of mixed lengths, beside equal ones; torch's choice of kernel, and without cuDNN."""
    dtype = str(DTYPE).removeprefix("torch.")
    most, count, budget = (64, 16, 256) if TINY else (1024, 96, 8192)
    mixed = np.random.default_rng(0).integers(most // 16, most, count).tolist()
    equal = [sum(mixed) // count] * count
    with Workers.start() as workers:
        config = MODEL if TINY else shape(SHAPE)
        path = write_model(config, workers.folder / "model", dtype=dtype, device=DEVICE.type)
        if CUDA:
            torch.cuda.empty_cache()

        def measure(chosen: list[int], environment: dict[str, str]) -> dict[str, float]:
            case = Case(
                model=str(path), lengths=chosen, token_budget=budget, dtype=dtype, checkpointing="selective", steps=3
            )
            result = run_case(workers, case, ranks=1, environment=environment)
            return {
                "step_s": result.step_s, "tokens": result.tokens, "tokens_per_s": result.tokens / result.step_s,
                "mfu": result.utilisation, "peak_gb": result.peak_bytes / 1e9,
            }  # fmt: skip

        attempt("learner.json", "mixed lengths", lambda: measure(mixed, {}))
        attempt("learner.json", "equal lengths", lambda: measure(equal, {}))
        without = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
        attempt("learner.json", "mixed lengths, no cuDNN", lambda: measure(mixed, without))
