"""`slipstream bench staleness`: lines, lags and seeds in; a line for each run, then table, file and picture out."""

import argparse
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from slipstream.configs.runtime.errors import ConfigError
from slipstream.tools.bench.figures import Figures, bench_file
from slipstream.tools.bench.staleness.studies import SETTINGS, STUDIES, Study, plan
from slipstream.tools.bench.staleness.table import cells, figures, markdown_table, screen_table
from slipstream.tools.bench.staleness.workers import Outcome, train_all
from slipstream.tools.cli import at_least, new_file

LIBRARIES = ("torch", "transformers", "numpy")


def command(argv: Sequence[str]) -> int:
    """Trains every run of the study, shows how each line does at each lag, and keeps all curves in a file; returns 0.

    Raises: ConfigError for a line that the study lacks, SlipstreamError when the user asks for the end.
    """
    arguments = _parser().parse_args(argv)
    study = STUDIES[arguments.study]
    lags = sorted(set(study.lags if arguments.lags is None else arguments.lags))
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="slipstream-staleness-") as folder:
        runs = plan(
            study,
            lines=_lines(study, arguments.objectives),
            lags=lags,
            seeds=range(arguments.seeds),
            steps=arguments.steps,
            folder=Path(folder),
        )
        for outcome in train_all(runs, jobs=arguments.jobs):
            outcomes.append(outcome)
            print(_progress(outcome, done=len(outcomes), runs=len(runs)), flush=True)
    outcomes.sort(key=lambda outcome: (outcome.run.lag, outcome.run.seed))
    _report(arguments, study, outcomes)
    return 0


def _report(arguments: argparse.Namespace, study: Study, outcomes: Sequence[Outcome]) -> None:
    found = cells(study, outcomes)
    Console().print(screen_table(study, found))
    Figures(figures(found)).keep(
        bench_file(arguments.runs, f"staleness-{arguments.study}"),
        settings=_settings(arguments, study),
        details={"runs": [_record(outcome) for outcome in outcomes]},
    )
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown_table(study, found), encoding="utf-8")
        print(f"table in {arguments.markdown}")
    if arguments.plot is not None:
        from slipstream.tools.bench.staleness.plot import draw

        draw(study, outcomes, arguments.plot)
        print(f"picture in {arguments.plot}")


def _lines(study: Study, asked: Sequence[str] | None) -> list[str]:
    unknown = [line for line in asked or () if line not in study.lines]
    if unknown:
        raise ConfigError([f"this study has no {line!r}; it has {', '.join(study.lines)}" for line in unknown])
    return [line for line in study.lines if asked is None or line in asked]


def _progress(outcome: Outcome, *, done: int, runs: int) -> str:
    run, curves = outcome.run, outcome.curves
    name = f"{run.line}, k = {run.lag}, seed {run.seed}"
    found = f"halfway {curves.halfway:.2f}, end {curves.end:.2f}, area {curves.area:.2f}"
    return f"{done:>3}/{runs}  {name:<38} {found}  ({curves.seconds:.0f} s)"


def _settings(arguments: argparse.Namespace, study: Study) -> dict[str, Any]:
    return vars(arguments) | {
        "overrides": [*SETTINGS, *study.overrides],
        "lines": {name: list(line.overrides) for name, line in study.lines.items()},
        "libraries": {name: version(name) for name in LIBRARIES} | {"python": platform.python_version()},
    }


def _record(outcome: Outcome) -> dict[str, Any]:
    run, curves = outcome.run, asdict(outcome.curves)
    curves["rewards"] = _short(curves["rewards"])
    curves["figures"] = {name: _short(values) for name, values in curves["figures"].items()}
    return {"line": run.line, "lag": run.lag, "seed": run.seed, **curves}


def _short(values: Sequence[float]) -> list[float]:
    """Four digits are enough, and a third of the file."""
    return [float(f"{value:.4g}") for value in values]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream bench staleness",
        description="Train on data that is k steps old, with each objective, and compare what is learned.",
    )
    add = parser.add_argument
    add(
        "--study", choices=STUDIES, default="decay", help="what is compared, under which learning rate (default: decay)"
    )
    add("--lags", type=at_least(0), nargs="+", metavar="K", help="steps that data is held back (default: the study's)")
    add("--objectives", nargs="+", metavar="NAME", help="lines of the study (default: all)")
    add("--seeds", type=at_least(1), default=3, metavar="N", help="runs of each, with seeds 0 to N - 1 (default: 3)")
    add("--steps", type=at_least(1), default=400, help="training steps of a run (default: 400)")
    add(
        "--jobs", type=at_least(1), default=os.cpu_count(), metavar="N", help="runs at once (default: as many as cores)"
    )
    add("--plot", type=new_file, metavar="FILE", help="also draw the curves into this PNG")
    add("--markdown", type=new_file, metavar="FILE", help="also write the table there")
    add("--runs", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    return parser
