"""Cost of a learner's step by the length of its answers and by the number of its ranks, a core for each."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

from benchmarks.figures import Figure, Figures, interleave
from benchmarks.step import Case, qwen3, run_case, write_model
from benchmarks.workers import Workers
from slipstream.tools.cli import at_least, new_file

MODEL = qwen3(vocabulary=4096, hidden=128, layers=2, heads=2, kv_heads=1)
STYLE: Any = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "legend.frameon": False,
}  # fmt: skip

Durations = dict[tuple[int, int], list[float]]
"""Seconds of a step by number of ranks and length."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Lengths and ranks."""
    add, positive = parser.add_argument, at_least(1)
    lengths = [256, 1024, 4096, 16_384, 32_768]
    add("--lengths", type=at_least(16), nargs="+", default=lengths, help="tokens of an answer")
    add("--ranks", type=positive, nargs="+", default=[1, 2], help="numbers of ranks")
    add("--tokens", type=positive, default=65_536, help="of a step, on all ranks together")
    add("--rounds", type=positive, default=1, help="processes for each figure")
    add("--plot", type=new_file, help="PNG of time per token over length")
    add("--plot-ranks", type=new_file, help="PNG of tokens per second over ranks")


def measure(options: argparse.Namespace, figures: Figures) -> dict[str, Any]:
    """Measures, shows and draws all figures. Raises: SlipstreamError when a process fails."""
    lengths, ranks = sorted(set(options.lengths)), sorted(set(options.ranks))
    durations: Durations = {(count, length): [] for count in ranks for length in lengths}
    details = []
    with Workers.start() as workers:
        model = str(write_model(MODEL, workers.folder / "model", dtype="float32"))
        for count, length in interleave(options.rounds, [(count, length) for length in lengths for count in ranks]):
            step = [length] * max(count, options.tokens // length)
            case = Case(model=model, lengths=step, token_budget=max(lengths), checkpointing="full")
            result = run_case(workers, case, ranks=count)
            durations[count, length].append(result.step_s * options.tokens / result.tokens)
            details.append({"ranks": count, "length": length, **asdict(result)})
            print(f"{_ranks(count)}, answers of {length:,}: {result.step_s:.2f} s", flush=True)
    speeds = {case: options.tokens / median(measured) for case, measured in durations.items()}
    for (count, length), speed in speeds.items():
        figures.show(Figure(f"{_ranks(count)}, answers of {length:,}", speed, "tokens/s"))
        if count > 1 and (1, length) in speeds:
            figures.show(Figure("  speed by that of one rank", speed / speeds[1, length]))
    if options.plot is not None:
        lines = {_ranks(count): [1e6 / speeds[count, length] for length in lengths] for count in ranks}
        draw(options.plot, lengths, lines, x="tokens of an answer", y="ms per 1,000 tokens", logarithmic=True)
    if options.plot_ranks is not None:
        lines = {f"answers of {length:,}": [speeds[count, length] for count in ranks] for length in lengths}
        draw(options.plot_ranks, ranks, lines, x="ranks, one core each", y="tokens/s")
    return {"steps": details}


def draw(
    path: Path,
    places: Sequence[int],
    lines: Mapping[str, Sequence[float]],
    *,
    x: str,
    y: str,
    logarithmic: bool = False,
) -> None:
    """Draws lines over the same places into a PNG."""
    mpl.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
        for label, values in lines.items():
            axes.plot(places, values, marker="o", label=label)
        if logarithmic:
            axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{place:,}" for place in places])
        axes.set_ylim(bottom=0)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.legend()
        figure.savefig(path, dpi=140)
        pyplot.close(figure)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"
