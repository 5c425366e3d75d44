"""SFT and DPO on rows of very different lengths, in turns with TRL: speed, peak memory, and the losses of both."""

import argparse
import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from transformers import AutoTokenizer

from benchmarks.figures import Figure, Figures, Goal, interleave
from benchmarks.learner import MODEL, add_trl_option, answer_lengths, has_trl, run_loop
from benchmarks.step import write_model
from benchmarks.workers import Workers
from slipstream.configs import RunConfig
from slipstream.configs.schema.trainers import FileTrainer
from slipstream.learner.data.row_order import open_rows
from slipstream.models.digits import build_digits_model
from slipstream.tools.cli import at_least

OURS, TRL = "slipstream", "TRL"
TRAININGS = ("sft", "dpo")
LR = 1e-4
PROMPT_TOKENS = 32
SPEEDUP = Goal(">=", 1.5)
"""Of TRL's time of a step divided by ours."""
DIFFERENCE = Goal("<", 0.01)
"""Largest relative difference of the losses of a step: both train on the same rows in the same order."""

Result = dict[str, Any]
"""`step_s`, `process_bytes` and `losses` of the steps."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The trainings."""
    add = parser.add_argument
    add("--trainings", nargs="+", choices=TRAININGS, default=TRAININGS, help="which to measure")
    add("--rounds", type=at_least(1), default=2, help="runs of each")
    add("--steps", type=at_least(2), default=4, help="steps of a run; all but the first are measured")
    add("--rows", type=at_least(2), default=16, help="rows or pairs of a step")
    add("--tokens", type=at_least(2), default=64, help="mean length of the log-normal answers")
    add("--micro-batch", type=at_least(1), default=8, help="rows or pairs of one of TRL's padded micro-batches")
    add("--token-budget", type=at_least(8), default=4096, help="of our packed micro-batches")
    add_trl_option(parser)


def measure(options: argparse.Namespace, figures: Figures) -> dict[str, Any]:
    """Measures and shows all figures. Raises: ConfigError without `--trl-python`'s file, SlipstreamError."""
    results: dict[str, dict[str, list[Result]]] = {training: defaultdict(list) for training in options.trainings}
    loops = [OURS, TRL] if has_trl(options) else [OURS]
    with Workers.start() as workers:
        model = write_model(MODEL, workers.folder / "model", dtype="float32")
        build_digits_model(workers.folder / "digits", seed=0)
        AutoTokenizer.from_pretrained(workers.folder / "digits").save_pretrained(model)
        for training in options.trainings:
            rows = write_rows(workers.folder / f"{training}.jsonl", training, options)
            for loop in interleave(options.rounds, loops):
                config = run_config(workers.folder, training, len(results[training][loop]), options)
                if loop == OURS:
                    result = run_ours(workers, config)
                else:
                    result = run_loop(
                        workers, options.trl_python, training, workers.folder, trl_task(config, rows, options)
                    )
                results[training][loop].append(result)
                print(f"{training}, {loop}: {result['step_s']:.2f} s a step", flush=True)
    for training, by_loop in results.items():
        figures.show(*figures_of(training, by_loop))
    return results


def write_rows(file: Path, training: str, options: argparse.Namespace) -> list[dict[str, str]]:
    """Rows of random digits in TRL's form, as many as the run trains on; log-normal answers."""
    rng, count = np.random.default_rng(0), options.steps * options.rows
    answers = 2 * count if training == "dpo" else count
    lengths = answer_lengths(answers, answers * options.tokens)

    def text(tokens: int) -> str:
        return "".join(map(str, rng.integers(0, 10, tokens)))

    # A stop token follows each answer.
    texts = [text(length - 1) for length in lengths]
    if training == "dpo":
        pairs = zip(texts[::2], texts[1::2], strict=True)
        rows = [{"prompt": text(PROMPT_TOKENS), "chosen": chosen, "rejected": rejected} for chosen, rejected in pairs]
    else:
        rows = [{"prompt": text(PROMPT_TOKENS), "completion": answer} for answer in texts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


def run_config(folder: Path, training: str, number: int, options: argparse.Namespace) -> RunConfig:
    """A training on the written rows, with a constant learning rate."""
    return RunConfig.model_validate(
        {
            "run": {"name": f"{training}-{number}", "dir": str(folder)},
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "learner": {
                "trainer": {
                    "name": training,
                    "data": str(folder / f"{training}.jsonl"),
                    "rows_per_step": options.rows,
                },
                "steps": options.steps,
                "token_budget": options.token_budget,
                "optimizer": {"lr": LR, "warmup_steps": 0, "final_lr_fraction": 1},
                "checkpoint": {"every_steps": options.steps},
            },
        }
    )


def run_ours(workers: Workers, config: RunConfig) -> Result:
    """Trains to the end. Raises: SlipstreamError when that fails."""
    peak_bytes = 0
    with workers.process(config.run.name, "slipstream.learner.cli", workers.write_config(config)) as child:
        process = psutil.Process(child.process.pid)

        def tick() -> None:
            nonlocal peak_bytes
            with contextlib.suppress(psutil.NoSuchProcess):
                peak_bytes = max(peak_bytes, process.memory_info().rss)

        workers.wait(child, tick)
    records = [json.loads(line) for line in config.paths.metrics.read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    return {
        # Without the checkpoint that follows the last one.
        "step_s": median(step["wait_s"] + step["train_s"] for step in steps[1:]),
        "process_bytes": peak_bytes,
        "losses": [step["loss"] for step in steps],
    }


def trl_task(config: RunConfig, rows: Sequence[Mapping[str, str]], options: argparse.Namespace) -> dict[str, Any]:
    """The training in TRL's terms, on the rows in our order."""
    trainer, optimizer = config.learner.trainer, config.learner.optimizer
    assert isinstance(trainer, FileTrainer), "both trainings are on rows of files"
    order, _ = open_rows(trainer.data, validation=(), held_out=0, seed=config.run.seed)
    refs = [ref for step in range(options.steps) for ref in order.step(step, rows=options.rows)]
    return {
        "rows": [rows[ref.index] for ref in refs],
        "threads": 1,
        "settings": {
            "max_steps": options.steps,
            "per_device_train_batch_size": min(options.micro_batch, options.rows),
            "gradient_accumulation_steps": max(1, options.rows // options.micro_batch),
            "learning_rate": optimizer.lr,
            "adam_beta1": optimizer.betas[0],
            "adam_beta2": optimizer.betas[1],
            "weight_decay": optimizer.weight_decay,
            "max_grad_norm": optimizer.clip_norm,
        },
    }


def figures_of(training: str, results: Mapping[str, Sequence[Result]]) -> Iterator[Figure]:
    """Medians over the rounds, the ratio of the two times of a step, and the difference of the losses."""
    step_s = {loop: median(run["step_s"] for run in runs) for loop, runs in results.items()}
    for loop, runs in results.items():
        yield Figure(f"{training}, {loop}: a step", step_s[loop], "s")
        yield Figure("  peak memory of the process", median(run["process_bytes"] for run in runs) / 1e9, "GB")
    if TRL in results:
        yield Figure(f"{training}: a step, TRL / slipstream", step_s[TRL] / step_s[OURS], "", SPEEDUP)
        pairs = zip(results[OURS][0]["losses"], results[TRL][0]["losses"], strict=True)
        yield Figure("  largest difference of losses", max(abs(a - b) / abs(b) for a, b in pairs), "", DIFFERENCE)
