"""`slipstream bench staleness`: each objective trained on data that is k steps old, and compared."""

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Final

from pebble import ProcessExpired, ProcessPool

from slipstream.configs import RunConfig, load
from slipstream.configs.load import load_config
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.configs.runtime.signals import StopSignals
from benchmarks.figures import Figure, Figures, bench_parser
from benchmarks.staleness_report import Curves, Run, draw, markdown, table
from benchmarks.workers import raise_if_stopped
from slipstream.tools.cli import at_least, new_file

DEMO: Final = Path(load.__file__).parent / "demo.yaml"
SETTINGS: Final = (
    "learner.groups_per_step=32",
    "learner.updates_per_step=2",  # with one, target and proximal policy are equal, and so are the losses
    "rollout.group_size=8",
    "learner.optimizer.lr=7.0e-4",
    "learner.optimizer.warmup_steps=20",
    # Where all answers are right, no advantage opposes the demo's bonus: at long lags it would undo what is learned,
    # and the lag would be blamed.
    "learner.loss.entropy_bonus=0",
)
"""Changes to the demo."""
LIBRARIES = ("torch", "transformers", "numpy")
POLL_S = 0.2

_NO_DECAY: Final = "learner.optimizer.final_lr_fraction=1"
_DECOUPLED: Final = "learner.correction={proximal: recompute, weight: token, cap: 2}"
_NO_WEIGHT: Final = "learner.correction={proximal: recompute, weight: none}"


@dataclass(frozen=True)
class Objective:
    """A row of the table, a line of the plot."""

    title: str
    overrides: tuple[str, ...]


OBJECTIVES: Final[Mapping[str, Objective]] = {
    "behaviour-clipped": Objective(
        "PPO clipped against the behaviour policy", ("learner.correction={proximal: behaviour, weight: none}",)
    ),
    "decoupled": Objective("decoupled PPO, weight capped at 2", (_DECOUPLED,)),
    # The weight is that of the policy at the step's start: it does not cover the change by the first update.
    "tis": Objective("truncated importance sampling, cap 2", ("learner.loss.name=reinforce", _DECOUPLED)),
    "icepop": Objective(
        "IcePop, band 0.5 to 5", ("learner.correction={proximal: recompute, weight: token, band: [0.5, 5]}",)
    ),
    "proximal-only": Objective("proximal recomputed, no weight", (_NO_WEIGHT,)),
    "reinforce": Objective("plain REINFORCE", ("learner.loss.name=reinforce", _NO_WEIGHT)),
}
_RATE: Final = "learner.throttle={learning_rate: true}"
THROTTLED: Final[Mapping[str, Objective]] = {
    "behaviour-clipped": OBJECTIVES["behaviour-clipped"],
    "decoupled": OBJECTIVES["decoupled"],
    "decoupled-lag": Objective("decoupled PPO, throttle of the lag", (_DECOUPLED, "learner.throttle={}")),
    "decoupled-lag-rate": Objective("decoupled PPO, throttle of lag and learning rate", (_DECOUPLED, _RATE)),
    "reinforce": OBJECTIVES["reinforce"],
    "reinforce-lag-rate": Objective(
        "plain REINFORCE, throttle of lag and learning rate", (*OBJECTIVES["reinforce"].overrides, _RATE)
    ),
}


@dataclass(frozen=True)
class Study:
    """A comparison of objectives over lags."""

    title: str
    objectives: Mapping[str, Objective]
    lags: tuple[int, ...]
    overrides: tuple[str, ...] = ()


STUDIES: Final[Mapping[str, Study]] = {
    "decay": Study("learning rate decays to 0", OBJECTIVES, (0, 4, 16, 64)),
    "throttle": Study("constant learning rate, with and without the throttle", THROTTLED, (16, 64), (_NO_DECAY,)),
}


Plan = Mapping[Run, RunConfig]
"""The configuration of each run."""


def command(argv: Sequence[str]) -> int:
    """Trains all runs of the study, prints the table and saves all curves; returns 0.

    Raises: ConfigError for an objective that the study lacks, SlipstreamError after a signal or a worker's death.
    """
    arguments = _parser().parse_args(argv)
    study = STUDIES[arguments.study]
    names = list(study.objectives) if arguments.objectives is None else arguments.objectives
    unknown = [name for name in names if name not in study.objectives]
    if unknown:
        raise ConfigError([f"--objectives {name}: this study has {', '.join(study.objectives)}" for name in unknown])
    lags = sorted(set(study.lags if arguments.lags is None else arguments.lags))
    results: dict[Run, Curves] = {}
    with tempfile.TemporaryDirectory(prefix="slipstream-staleness-") as folder:
        runs = plan(study, names, lags=lags, seeds=arguments.seeds, steps=arguments.steps, folder=Path(folder))
        for run, curves in train_all(runs, jobs=arguments.jobs):
            results[run] = curves
            name = f"{run.objective}, k = {run.lag}, seed {run.seed}"
            rewards = f"end {curves.end:.2f}, area {curves.area:.2f}  ({curves.seconds:.0f} s)"
            print(f"{len(results):>3}/{len(runs)}  {name:<38} {rewards}", flush=True)
    _report(arguments, study, results)
    return 0


def plan(study: Study, objectives: Sequence[str], *, lags: Sequence[int], seeds: int, steps: int, folder: Path) -> Plan:
    """Runs with their configurations; those of one seed share their initial weights, which are built in `folder`."""

    def config(name: str, lag: int, seed: int) -> RunConfig:
        own = (f"run.dir={folder}", f"run.name=seed{seed}", f"run.seed={seed}", f"learner.steps={steps}")
        changes = (*SETTINGS, *study.overrides, *own, f"buffer.max_staleness={lag}")
        return load_config(DEMO, (*changes, *study.objectives[name].overrides))

    known = [name for name in study.objectives if name in objectives]
    runs = [Run(name, lag, seed) for seed in range(seeds) for lag in lags for name in known]
    return {run: config(run.objective, run.lag, run.seed) for run in runs}


def train_all(runs: Plan, *, jobs: int) -> Iterator[tuple[Run, Curves]]:
    """Trains up to `jobs` runs at once; yields each as it ends. For the main thread.

    Raises: SlipstreamError after a signal, or when a worker died; no worker is left then.
    """
    # Imported here: it takes seconds, and --help should not.
    from benchmarks.staleness_train import train

    # Not forked: torch's threads would not survive that.
    pool = ProcessPool(max_workers=min(jobs, len(runs)), initializer=_prepare_worker, context=get_context("spawn"))
    with StopSignals() as signals:
        try:
            pending: dict[Future[Curves], Run] = {pool.schedule(train, args=(runs[run],)): run for run in runs}
            while pending:
                raise_if_stopped(signals)
                for future in [future for future in pending if future.done()]:
                    yield pending.pop(future), future.result()
                signals.wait(POLL_S)
        except ProcessExpired as error:
            raise SlipstreamError(f"a worker ended with exit code {error.exitcode}") from None
        finally:
            pool.stop()  # type: ignore[no-untyped-call]  # pebble annotates all but this one
            pool.join()


def _prepare_worker() -> None:
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(1)  # there is a worker for each core
    disable_progress_bar()


def _report(arguments: argparse.Namespace, study: Study, results: Mapping[Run, Curves]) -> None:
    titles = {name: objective.title for name, objective in study.objectives.items()}
    cells = table(results)
    print(f"{study.title}: reward at the end / area\n\n{markdown(titles, cells)}")
    own = {
        "overrides": [*SETTINGS, *study.overrides],
        "objectives": {name: list(objective.overrides) for name, objective in study.objectives.items()},
        "libraries": {name: version(name) for name in LIBRARIES},
    }
    figures = [
        Figure(f"{objective}, k = {lag}, {name}", fmean(values), "")
        for objective, row in cells.items()
        for lag, cell in row.items()
        for name, values in (("end", cell.ends), ("area", cell.areas))
    ]
    details = {"runs": [asdict(run) | asdict(curves) for run, curves in results.items()]}
    Figures(figures).save_bench(f"staleness-{arguments.study}", arguments, details=details, settings=own)
    if arguments.plot is not None:
        draw(study.title, titles, results, arguments.plot)
        print(f"picture in {arguments.plot}")


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser(
        "staleness", "Train on data that is k steps old, with each objective, and compare what is learned."
    )
    add, positive = parser.add_argument, at_least(1)
    add("--study", choices=STUDIES, default="decay", help="objectives and learning rate (default: decay)")
    add("--lags", type=at_least(0), nargs="+", metavar="K", help="steps that data is delayed (default: the study's)")
    add("--objectives", nargs="+", metavar="NAME", help="objectives of the study (default: all)")
    add("--seeds", type=positive, default=3, metavar="N", help="runs of each, with seeds 0 to N - 1 (default: 3)")
    add("--steps", type=positive, default=400, help="training steps of a run (default: 400)")
    add("--jobs", type=positive, default=os.cpu_count(), metavar="N", help="runs at once (default: number of cores)")
    add("--plot", type=new_file, metavar="FILE", help="also draw the curves into this PNG")
    return parser
