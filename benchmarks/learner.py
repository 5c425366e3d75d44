"""A learner's step on a CPU, in turns with a plain packed loop and with TRL."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.figures import Figure, Figures, Goal, interleave
from benchmarks.step import Case, qwen3, run_case, write_model
from benchmarks.workers import Workers
from slipstream.configs.runtime.errors import ConfigError
from slipstream.tools.cli import at_least

OURS, LEAN, PLAIN, TRL = "slipstream", "slipstream, lean", "plain loop", "TRL"
SHARED, ALONE = "prompts shared", "each answer alone"
SHARING = {"speed": Goal(">=", 4.0), "share": Goal(">=", 0.9)}
"""Of a group of answers whose prompt is computed once: speed over that of each answer with its own copy, and its share
of the ratio of computed tokens."""
SPEEDUP = {OURS: Goal(">=", 1.8), LEAN: Goal(">=", 1.0)}
"""Of the speed, over that of the plain loop."""
MEMORY = {OURS: Goal("<", 2.3), LEAN: Goal("<", 1.5)}
LOOPS = Path(__file__).parent / "loops.py"
TRL_PYTHON = Path(".trl/bin/python")
MODEL = qwen3(vocabulary=32_768, hidden=384, layers=6, heads=6, kv_heads=2, intermediate_size=1024)
LEAN_BUDGET = 1024
LR = 1e-6
KEPT = ("step_s", "cpu_s", "process_bytes")

Results = Mapping[str, Sequence[Mapping[str, float]]]
"""`step_s`, `cpu_s` and `process_bytes` of each round, by loop."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The step, and TRL."""
    add, positive = parser.add_argument, at_least(1)
    add("--answers", type=positive, default=64, help="of a step")
    add("--tokens", type=positive, default=16_414, help="of all answers together")
    add("--token-budget", type=positive, default=2048, help="of a micro-batch")
    add("--prompt", type=positive, default=1024, help="tokens of the prompt of a group of answers")
    add("--group", type=positive, default=8, help="answers to that prompt; 1: without this case")
    add("--answer", type=positive, default=128, help="tokens of each of them")
    add("--threads", type=positive, default=2, help="of each loop")
    add("--rounds", type=positive, default=3, help="processes for each figure")
    add_trl_option(parser)


def add_trl_option(parser: argparse.ArgumentParser) -> None:
    """The interpreter of an environment with TRL."""
    parser.add_argument(
        "--trl-python", type=Path, help=f"interpreter that has TRL, such as {TRL_PYTHON} (default: without TRL)"
    )


def measure(options: argparse.Namespace, figures: Figures) -> dict[str, Any]:
    """Measures and shows all figures. Raises: ConfigError without `--trl-python`'s file, SlipstreamError."""
    lengths = answer_lengths(options.answers, options.tokens)
    loops = [OURS, LEAN, PLAIN] + ([TRL] if has_trl(options) else []) + ([SHARED, ALONE] if options.group > 1 else [])
    results: dict[str, list[Mapping[str, float]]] = {loop: [] for loop in loops}
    with Workers.start() as workers:
        model = write_model(MODEL, workers.folder / "model", dtype="float32")
        budget, threads = options.token_budget, options.threads
        usual = Case(model=str(model), lengths=lengths, token_budget=budget, threads=threads, keep_freed=True)
        lean = replace(usual, token_budget=LEAN_BUDGET, logits_bytes=0, checkpointing="full", keep_freed=False)
        grouped = [options.prompt + options.answer] * options.group
        shared = replace(usual, lengths=grouped, prompt=options.prompt, group=options.group)
        cases = {OURS: usual, LEAN: lean, SHARED: shared, ALONE: replace(shared, shares_prefixes=False)}
        computed: dict[str, Mapping[str, float]] = {}
        for loop in interleave(options.rounds, loops):
            if loop in cases:
                measured = run_case(workers, cases[loop], ranks=1)
                result = asdict(measured)
                computed[loop] = measured.figures
            else:
                python = Path(sys.executable) if loop == PLAIN else options.trl_python
                result = run_loop(workers, python, "plain" if loop == PLAIN else "trl", workers.folder, _task(usual))
            results[loop].append({name: result[name] for name in KEPT if name in result})
            print(f"{loop}: {result['step_s']:.2f} s", flush=True)
    figures.show(
        *figures_of({loop: results[loop] for loop in loops if loop not in (SHARED, ALONE)}, sum(lengths) - len(lengths))
    )
    if options.group > 1:
        figures.show(*sharing_figures(results, sum(grouped) - len(grouped), computed))
    return {"results": results, "lengths": lengths}


def has_trl(options: argparse.Namespace) -> bool:
    """True if TRL is measured too. Raises: ConfigError when its interpreter does not exist."""
    python: Path | None = options.trl_python
    if python is not None and not python.is_file():
        raise ConfigError(f"--trl-python {python} does not exist; `make bench-learner` installs TRL")
    return python is not None


def answer_lengths(answers: int, tokens: int) -> list[int]:
    """Lengths of sequences, of one token and an answer each; the answers are log-normal and sum to `tokens`."""
    shares = np.random.default_rng(0).lognormal(sigma=0.8, size=answers)
    own = np.maximum(1, np.floor(shares / shares.sum() * tokens)).astype(int)
    own[: tokens - own.sum()] += 1
    return [int(length) + 1 for length in own]


def run_loop(
    workers: Workers,
    python: Path,
    loop: str,
    folder: Path,
    task: Mapping[str, Any],
    environment: Mapping[str, str] = {},
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Runs another loop, for the model in `folder`; calls `tick` meanwhile. Raises: SlipstreamError when it fails."""
    (folder / "case.json").write_text(json.dumps(dict(task)), encoding="utf-8")
    command = [str(python.absolute()), str(LOOPS), loop, str(folder)]
    threads = {"OMP_NUM_THREADS": str(task["threads"])}
    with workers.command(f"{folder.name}-{loop}", command, {**threads, **environment}) as child:
        workers.wait(child, tick)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return result


def _task(case: Case) -> dict[str, Any]:
    """The step of a case on random tokens, for another loop."""
    rng = np.random.default_rng(0)
    return {
        "sequences": [rng.integers(4, MODEL["vocab_size"], length).tolist() for length in case.lengths],
        "advantages": [1.0 - 2.0 * (number % 2) for number in range(len(case.lengths))],
        "token_budget": case.token_budget,
        "lr": LR,
        "steps": case.steps,
        "threads": case.threads,
    }


def figures_of(results: Results, tokens: int) -> Iterator[Figure]:
    """Speed in tokens of answers, speed over that of the plain loop, and peak memory of the process."""
    speeds = {loop: tokens / median(each["step_s"] for each in rounds) for loop, rounds in results.items()}
    for loop, rounds in results.items():
        yield Figure(loop, speeds[loop], "tokens/s")
        if loop != PLAIN:
            yield Figure("  speed by that of the plain loop", speeds[loop] / speeds[PLAIN], "", SPEEDUP.get(loop))
        memory = median(each["process_bytes"] for each in rounds)
        yield Figure("  peak memory of the process", memory / 1e9, "GB", MEMORY.get(loop))


def sharing_figures(results: Results, tokens: int, computed: Mapping[str, Mapping[str, float]]) -> Iterator[Figure]:
    """Speed in input tokens of the sequences, prompts included, and over that of each sequence alone, by CPU time.

    Args:
        computed: metrics of a step, by loop. The ratio of operations is less than that of tokens: the head computes
            all actions in both.
    """
    for loop in (SHARED, ALONE):
        yield Figure(loop, tokens / median(each["step_s"] for each in results[loop]), "tokens/s")
        yield Figure(
            "  peak memory of the process", median(each["process_bytes"] for each in results[loop]) / 1e9, "GB"
        )
    shared, alone = (median(each["cpu_s"] for each in results[loop]) for loop in (SHARED, ALONE))
    saving = computed[SHARED]["prefix_saving"]
    yield Figure("  speed by that of each answer alone", alone / shared, "", SHARING["speed"])
    yield Figure("  share of the ratio of computed tokens", alone / shared * (1 - saving), "", SHARING["share"])
    operations = computed[ALONE]["flops"] / computed[SHARED]["flops"]
    yield Figure("  share of the ratio of computed operations", alone / shared / operations)
