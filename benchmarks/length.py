"""`slipstream bench length`: cost of a learner's step by the length of its answers and by the number of its ranks."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from slipstream.configs.runtime.logging import configure_logging
from benchmarks.figures import Figure, Figures, bench_parser, interleave
from benchmarks.workers import Workers
from slipstream.tools.cli import at_least, new_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LENGTHS = (256, 1024, 4096, 16_384, 32_768)
RANKS = (1, 2)
TOKENS = 65_536
MODEL: Mapping[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 4096, "hidden_size": 128,
    "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 64, "max_position_embeddings": 65_536, "tie_word_embeddings": False,
}  # fmt: skip
Results = dict[int, dict[int, list[float]]]
"""Durations of a step by number of ranks and length."""


def command(argv: Sequence[str]) -> int:
    """Measures, prints, saves and draws all figures; returns 0. Raises: SlipstreamError when a process fails."""
    arguments = _parser().parse_args(argv)
    # Imported here: torch takes seconds, and --help should not.
    from benchmarks.shape_step import Case, run_case, write_model

    configure_logging("bench", level="warning", folder=None)
    lengths = sorted(set(arguments.lengths))
    results: Results = {ranks: {length: [] for length in lengths} for ranks in sorted(set(arguments.ranks))}
    details = []
    with Workers.start() as workers:
        model = str(write_model(MODEL, workers.folder / "model", dtype="float32"))
        cases = [(ranks, length) for length in lengths for ranks in results]
        for ranks, length in interleave(arguments.rounds, cases):
            step = [length] * max(ranks, arguments.tokens // length)
            case = Case(model=model, lengths=step, token_budget=max(lengths), checkpointing="full")
            result = run_case(workers, case, ranks=ranks)
            results[ranks][length].append(result.step_s * arguments.tokens / result.tokens)
            details.append({"ranks": ranks, "length": length, **asdict(result)})
            print(f"{ranks} rank{'s' * (ranks > 1)}, answers of {length:,}: {result.step_s:.2f} s", flush=True)
    figures = Figures()
    figures.show(length_figures(results, arguments.tokens))
    figures.save_bench("length", arguments, details={"steps": details})
    if arguments.plot is not None:
        draw_lengths(results, arguments.tokens, arguments.plot)
    if arguments.plot_ranks is not None:
        draw_ranks(results, arguments.tokens, arguments.plot_ranks)
    return 0


def length_figures(results: Results, tokens: int) -> Iterator[Figure]:
    """Speeds by ranks and length, and what a second rank gains."""
    speeds = {
        ranks: {length: tokens / median(durations) for length, durations in by_length.items()}
        for ranks, by_length in results.items()
    }
    for ranks, by_length in speeds.items():
        for length, speed in by_length.items():
            yield Figure(f"{ranks} rank{'s' * (ranks > 1)}, answers of {length:,}", speed, "tokens/s")
            if ranks > 1 and 1 in speeds:
                yield Figure("  speed by that of one rank", speed / speeds[1][length], "")


def draw_lengths(results: Results, tokens: int, path: Path) -> None:
    """Draws time per 1,000 tokens over the length of answers, a line for each number of ranks."""
    with _axes(path) as axes:
        for ranks, by_length in results.items():
            per_thousand = [1e6 * median(durations) / tokens for durations in by_length.values()]
            axes.plot(list(by_length), per_thousand, marker="o", label=f"{ranks} rank{'s' * (ranks > 1)}")
        lengths = list(next(iter(results.values())))
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens of an answer")
        axes.set_ylabel("ms per 1,000 tokens")
        axes.legend()


def draw_ranks(results: Results, tokens: int, path: Path) -> None:
    """Draws tokens per second over the number of ranks, a line for each length."""
    with _axes(path) as axes:
        for length in next(iter(results.values())):
            speeds = [tokens / median(by_length[length]) for by_length in results.values()]
            axes.plot(list(results), speeds, marker="o", label=f"answers of {length:,}")
        axes.set_xticks(list(results))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("ranks, one core each")
        axes.set_ylabel("tokens/s")
        axes.legend()


@contextmanager
def _axes(path: Path) -> "Iterator[Axes]":
    """Axes of a figure that is saved as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    style: Any = {
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
        "legend.frameon": False,
    }  # fmt: skip
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
        yield axes
        figure.savefig(path, dpi=140)
        pyplot.close(figure)


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser(
        "length", "Measure a learner's step by the length of answers and the number of ranks, a core for each."
    )
    add, positive = parser.add_argument, at_least(1)
    add("--lengths", type=at_least(16), nargs="+", default=LENGTHS, help="tokens of an answer (default: 256 … 32768)")
    add("--ranks", type=positive, nargs="+", default=RANKS, help="numbers of ranks (default: 1 2)")
    add("--tokens", type=positive, default=TOKENS, help=f"of a step, on all ranks together (default: {TOKENS})")
    add("--rounds", type=positive, default=1, help="processes for each figure (default: 1)")
    add("--plot", type=new_file, help="PNG of time per token over length")
    add("--plot-ranks", type=new_file, help="PNG of tokens per second over ranks")
    return parser
