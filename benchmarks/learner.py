"""`slipstream bench learner`: a learner's step on a CPU, in turns with a plain packed loop and with TRL."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import configure_logging
from benchmarks.figures import Figure, Figures, Goal, bench_parser, interleave
from benchmarks.workers import Workers
from slipstream.tools.cli import at_least

if TYPE_CHECKING:
    from benchmarks.shape_step import Case

OURS, LEAN, PLAIN, TRL = "slipstream", "slipstream, lean", "plain loop", "TRL"
SPEEDUP = {OURS: 1.7, LEAN: 1.0}
"""Goals for the speed, over that of the plain loop."""
MOST_BYTES = {OURS: 2.3e9, LEAN: 1.5e9}
SCRIPT = Path(__file__).parent / "learner_loops.py"
DEFAULT_PYTHON = Path(".trl/bin/python")
MODEL: Mapping[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 32_768, "hidden_size": 384,
    "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
ANSWERS, TOKENS = 64, 16_414
BUDGET, LEAN_BUDGET = 2048, 1024
LR = 1e-6

Results = dict[str, list[dict[str, float]]]
"""`step_s` and `process_bytes` of each round, by loop."""


def command(argv: Sequence[str]) -> int:
    """Measures, prints and saves all figures; returns 0. Raises: SlipstreamError when a process fails."""
    arguments = _parser().parse_args(argv)
    if arguments.trl_python is not None and not arguments.trl_python.is_file():
        raise ConfigError(f"--trl-python {arguments.trl_python} does not exist; `make bench-learner` installs TRL")
    # Imported here: torch takes seconds, and --help should not.
    from benchmarks.shape_step import Case, run_case, write_model

    configure_logging("bench", level="warning", folder=None)
    lengths = answer_lengths(arguments.answers, arguments.tokens)
    loops = [OURS, LEAN, PLAIN] + ([TRL] if arguments.trl_python is not None else [])
    results: Results = {loop: [] for loop in loops}
    with Workers.start() as workers:
        model = write_model(MODEL, workers.folder / "model", dtype="float32")
        usual = Case(
            model=str(model), lengths=lengths, token_budget=BUDGET, steps=arguments.steps, threads=arguments.threads,
            keep_freed=True,
        )  # fmt: skip
        lean = replace(usual, token_budget=LEAN_BUDGET, logits_bytes=0, checkpointing="full", keep_freed=False)
        cases = {OURS: usual, LEAN: lean}
        for loop in interleave(arguments.rounds, loops):
            if loop in cases:
                result = asdict(run_case(workers, cases[loop], ranks=1))
            else:
                python = sys.executable if loop == PLAIN else str(arguments.trl_python)
                result = _run_script(workers, python, "plain" if loop == PLAIN else "trl", usual, lengths)
            results[loop].append({name: result[name] for name in ("step_s", "process_bytes")})
            print(f"{loop}: {result['step_s']:.2f} s", flush=True)
    figures = Figures()
    figures.show(figures_of(results, sum(lengths) - len(lengths)))
    figures.save_bench("learner", arguments, details={"results": results, "lengths": lengths})
    return 0


def answer_lengths(answers: int, tokens: int) -> list[int]:
    """Lengths of sequences, of one token and an answer each; the answers are log-normal and sum to `tokens`."""
    shares = np.random.default_rng(0).lognormal(sigma=0.8, size=answers)
    own = np.maximum(1, np.floor(shares / shares.sum() * tokens)).astype(int)
    own[: tokens - own.sum()] += 1
    return [int(length) + 1 for length in own]


def _run_script(workers: Workers, python: str, loop: str, usual: "Case", lengths: Sequence[int]) -> dict[str, float]:
    """A step of another loop on random tokens. Raises: SlipstreamError when it fails."""
    rng = np.random.default_rng(0)
    case = {
        "sequences": [rng.integers(4, MODEL["vocab_size"], length).tolist() for length in lengths],
        "advantages": [1.0 - 2.0 * (number % 2) for number in range(len(lengths))],
        "token_budget": BUDGET,
        "lr": LR,
        "steps": usual.steps,
        "threads": usual.threads,
    }
    (workers.folder / "case.json").write_text(json.dumps(case), encoding="utf-8")
    command = [python, str(SCRIPT), loop, str(workers.folder)]
    with workers.command(loop, command, {"OMP_NUM_THREADS": str(usual.threads)}) as child:
        workers.wait(child)
    result: dict[str, float] = json.loads((workers.folder / "result.json").read_text(encoding="utf-8"))
    return result


def figures_of(results: Results, tokens: int) -> list[Figure]:
    """Speed in tokens of answers, speed over that of the plain loop, and peak memory of the process."""
    speeds = {loop: tokens / median(each["step_s"] for each in rounds) for loop, rounds in results.items()}
    found = []
    for loop, rounds in results.items():
        memory = median(each["process_bytes"] for each in rounds)
        found.append(Figure(loop, speeds[loop], "tokens/s"))
        if loop != PLAIN:
            speedup = Goal(">=", SPEEDUP[loop]) if loop in SPEEDUP else None
            found.append(Figure("  speed by that of the plain loop", speeds[loop] / speeds[PLAIN], "", speedup))
        limit = Goal("<", MOST_BYTES[loop] / 1e9) if loop in MOST_BYTES else None
        found.append(Figure("  peak memory of the process", memory / 1e9, "GB", limit))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("learner", "Measure a learner's step on a CPU, in turns with a plain loop and with TRL.")
    add, positive = parser.add_argument, at_least(1)
    add("--answers", type=positive, default=ANSWERS, help=f"of a step (default: {ANSWERS})")
    add("--tokens", type=positive, default=TOKENS, help=f"of all answers together (default: {TOKENS})")
    add("--threads", type=positive, default=2, help="of each loop (default: 2)")
    add("--steps", type=positive, default=1, help="measured steps of a process, after a first one (default: 1)")
    add("--rounds", type=positive, default=3, help="processes for each figure (default: 3)")
    add("--trl-python", type=Path, help=f"interpreter that has TRL, such as {DEFAULT_PYTHON} (default: without TRL)")
    return parser
