"""Learning from data that is k steps old, with each objective."""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks.demo import DEMO
from benchmarks.figures import Figure, Figures
from benchmarks.staleness_report import Curves, Run, draw, markdown, table
from benchmarks.workers import Worker, Workers
from slipstream.configs import RunConfig
from slipstream.configs.load import load_config
from slipstream.configs.runtime.errors import ConfigError
from slipstream.tools.cli import at_least, new_file

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


def add_options(parser: argparse.ArgumentParser) -> None:
    """The study."""
    add, positive = parser.add_argument, at_least(1)
    add("--study", choices=STUDIES, default="decay", help="objectives and learning rate")
    add("--lags", type=at_least(0), nargs="+", metavar="K", help="steps that data is delayed (default: the study's)")
    add("--objectives", nargs="+", metavar="NAME", help="objectives of the study (default: all)")
    add("--seeds", type=positive, default=3, metavar="N", help="runs of each, with seeds 0 to N - 1")
    add("--steps", type=positive, default=400, help="training steps of a run")
    add("--jobs", type=positive, default=os.cpu_count(), metavar="N", help="runs at once")
    add("--plot", type=new_file, metavar="FILE", help="also draw the curves into this PNG")


def measure(options: argparse.Namespace, figures: Figures) -> dict[str, Any]:
    """Trains all runs of the study, prints the table and shows its figures.

    Raises: ConfigError for an objective that the study lacks, SlipstreamError after a signal or a worker's death.
    """
    study = STUDIES[options.study]
    names = list(study.objectives) if options.objectives is None else options.objectives
    unknown = [name for name in names if name not in study.objectives]
    if unknown:
        raise ConfigError([f"--objectives {name}: this study has {', '.join(study.objectives)}" for name in unknown])
    lags = sorted(set(study.lags if options.lags is None else options.lags))
    results: dict[Run, Curves] = {}
    with Workers.start() as workers:
        runs = plan(study, names, lags=lags, seeds=options.seeds, steps=options.steps, folder=workers.folder)
        for run, curves in train_all(workers, runs, jobs=options.jobs):
            results[run] = curves
            name = f"{run.objective}, k = {run.lag}, seed {run.seed}"
            rewards = f"end {curves.end:.2f}, area {curves.area:.2f}  ({curves.seconds:.0f} s)"
            print(f"{len(results):>3}/{len(runs)}  {name:<38} {rewards}", flush=True)
    titles = {name: objective.title for name, objective in study.objectives.items()}
    cells = table(results)
    print(f"{study.title}: reward at the end / area\n\n{markdown(titles, cells)}")
    for objective, row in cells.items():
        for lag, seeds in row.items():
            name = f"{objective}, k = {lag}"
            end, area = fmean(each.end for each in seeds), fmean(each.area for each in seeds)
            figures.show(Figure(f"{name}, end", end), Figure(f"{name}, area", area))
    if options.plot is not None:
        draw(study.title, titles, cells, options.plot)
    return {
        "overrides": [*SETTINGS, *study.overrides],
        "objectives": {name: list(objective.overrides) for name, objective in study.objectives.items()},
        "runs": [asdict(run) | asdict(curves) for run, curves in results.items()],
    }


def plan(study: Study, objectives: Sequence[str], *, lags: Sequence[int], seeds: int, steps: int, folder: Path) -> Plan:
    """Runs with their configurations; those of one seed share their initial weights, which are built in `folder`."""

    def config(name: str, lag: int, seed: int) -> RunConfig:
        own = (f"run.dir={folder}", f"run.name=seed{seed}", f"run.seed={seed}", f"learner.steps={steps}")
        changes = (*SETTINGS, *study.overrides, *own, f"buffer.max_staleness={lag}")
        return load_config(DEMO, (*changes, *study.objectives[name].overrides))

    known = [name for name in study.objectives if name in objectives]
    runs = [Run(name, lag, seed) for seed in range(seeds) for lag in lags for name in known]
    return {run: config(run.objective, run.lag, run.seed) for run in runs}


def train_all(workers: Workers, runs: Plan, *, jobs: int) -> Iterator[tuple[Run, Curves]]:
    """Trains up to `jobs` runs at once, each in a process; yields each as it ends. Raises: as `Workers.check`."""
    pending, busy = list(runs), dict[Worker, Run | None]()
    with ExitStack() as stack:
        for number in range(min(jobs, len(runs))):
            busy[stack.enter_context(workers.worker(f"trainer{number}", "benchmarks.staleness_train"))] = None
        while busy:
            workers.pause(POLL_S)
            for worker in [worker for worker in busy if worker.replied()]:
                done, curves = busy.pop(worker), worker.receive(Curves | None)
                if pending:
                    busy[worker] = following = pending.pop(0)
                    worker.send("train", runs[following].model_dump_json())
                if done is not None:
                    yield done, curves
