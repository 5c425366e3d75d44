"""Learning from data that is k steps old, with each objective."""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import msgspec

from benchmarks.demo import DEMO
from benchmarks.figures import Figure, Figures
from benchmarks.staleness_report import Curves, Run, draw, markdown, plottable, table, thinned
from benchmarks.workers import Worker, Workers
from slipstream.configs import RunConfig
from slipstream.configs.load import load_config
from slipstream.configs.runtime.errors import ConfigError
from slipstream.tools.cli import at_least, new_file

SETTINGS: Final = (
    "learner.groups_per_step=32",
    "rollout.group_size=8",
    "learner.optimizer.lr=7.0e-4",
    "learner.optimizer.warmup_steps=20",
    # Where all answers are right, no advantage opposes the demo's bonus: at long lags it would undo what is learned,
    # and the lag would be blamed.
    "learner.loss.entropy_bonus=0",
    "weights.publish_every_steps=1",
)
"""Changes to the demo and to recipes."""
TWO_UPDATES: Final = "learner.updates_per_step=2"
"""Change to the demo: with one, target and proximal policy are equal, and so are the losses. Recipes have their own."""
SHORT: Final = (
    "env.options.length=2",
    "env.options.eval_tasks=10",
    "rollout.sampling.max_tokens=2",
    "learner.groups_per_step=16",
    "learner.optimizer.lr=1.0e-3",
)
"""Changes to these for a comparison of many algorithms: two digits, solved in 300 steps of 14 CPU seconds."""
RECIPES: Final = DEMO.parent / "recipes"
POLL_S = 0.2

_NO_DECAY: Final = "learner.optimizer.final_lr_fraction=1"
_DECOUPLED: Final = "learner.correction={proximal: recompute, weight: token, cap: 2}"
_NO_WEIGHT: Final = "learner.correction={proximal: recompute, weight: none}"


@dataclass(frozen=True)
class Objective:
    """A row of the table, a line of the plot."""

    title: str
    overrides: tuple[str, ...]
    file: Path = DEMO
    """Configuration that the overrides change."""


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


def recipe(name: str) -> Objective:
    """The algorithm of a recipe, with its own settings but for those of the study."""
    return Objective(f"`{name}`", (), RECIPES / f"{name}.yaml")


COMPARED: Final = (
    "ipo", "kpop", "vespo", "asympo", "max_rl", "deepseek_v3_2", "seq_mask_tis", "vcpo", "m2po", "gspo", "cispo",
    "topr", "dppo", "sppo", "online_dpo", "prime",
)  # fmt: skip
"""Recipes of the study `recipes`."""


@dataclass(frozen=True)
class Study:
    """A comparison of objectives over lags."""

    title: str
    objectives: Mapping[str, Objective]
    lags: tuple[int, ...]
    overrides: tuple[str, ...] = ()
    steps: int = 400


STUDIES: Final[Mapping[str, Study]] = {
    "decay": Study("learning rate decays to 0", OBJECTIVES, (0, 4, 16, 64)),
    "throttle": Study("constant learning rate, with and without the throttle", THROTTLED, (16, 64), (_NO_DECAY,)),
    "recipes": Study(
        "recipes, learning rate decays to 0",
        {name: OBJECTIVES[name] for name in ("decoupled", "tis", "behaviour-clipped", "proximal-only", "reinforce")}
        | {name: recipe(name) for name in COMPARED},
        (0, 4, 16, 64),
        SHORT,
        steps=300,
    ),
}

Plan = Mapping[Run, RunConfig]
"""The configuration of each run."""


@dataclass
class FinishedRuns:
    """Runs that have ended, a line each in a file, so that a study that was stopped goes on where it was."""

    file: Path | None
    """None: nothing is kept."""
    _curves: dict[str, Curves] = field(default_factory=dict)
    """By the hash of the run's configuration."""

    def __post_init__(self) -> None:
        if self.file is not None and self.file.exists():
            *lines, rest = self.file.read_bytes().split(b"\n")
            if rest:  # a write that was cut off
                self.file.write_bytes(b"".join(line + b"\n" for line in lines))
            kept = [msgspec.json.decode(line, type=tuple[str, Run, Curves]) for line in lines]
            self._curves |= {key: curves for key, _, curves in kept}

    def of(self, config: RunConfig) -> Curves | None:
        """The curves of a run with this configuration, but for its folder; None: not finished."""
        return self._curves.get(self._key(config))

    def add(self, run: Run, config: RunConfig, curves: Curves) -> None:
        """Keeps a run."""
        if self.file is not None:
            line = msgspec.json.encode((self._key(config), run, curves))
            with self.file.open("ab") as file:
                file.write(line + b"\n")

    def _key(self, config: RunConfig) -> str:
        # Without defaults: a key that is added to the schema does not make a run another one.
        own = config.model_dump_json(exclude={"run": {"dir"}}, exclude_defaults=True)
        return sha256(own.encode()).hexdigest()[:16]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The study."""
    add, positive = parser.add_argument, at_least(1)
    add("--study", choices=STUDIES, default="decay", help="objectives, task and learning rate")
    add("--lags", type=at_least(0), nargs="+", metavar="K", help="steps that data is delayed (default: the study's)")
    add("--objectives", nargs="+", metavar="NAME", help="objectives of the study, or recipes (default: the study's)")
    add("--seeds", type=positive, default=3, metavar="N", help="runs of each, with seeds 0 to N - 1")
    add("--steps", type=positive, help="training steps of a run (default: the study's)")
    add("--jobs", type=at_least(0), default=os.cpu_count(), metavar="N", help="runs at once; 0: show what is kept")
    add("--keep", type=new_file, metavar="FILE", help="add each finished run to this file; those in it aren't repeated")
    add("--plot", type=new_file, metavar="FILE", help="also draw the curves into this PNG")


def measure(options: argparse.Namespace, figures: Figures) -> dict[str, Any]:
    """Trains all runs of the study, prints the table and shows its figures.

    Raises: ConfigError for an objective that can't be run, SlipstreamError after a signal or a worker's death.
    """
    study = STUDIES[options.study]
    objectives = chosen(study, options.objectives)
    if options.plot is not None and not plottable(objectives):
        raise ConfigError([f"--plot: {len(objectives)} lines can't be told apart; choose fewer --objectives"])
    lags = sorted(set(study.lags if options.lags is None else options.lags))
    finished = FinishedRuns(options.keep)
    with Workers.start() as workers:
        steps = options.steps or study.steps
        runs = plan(study, objectives, lags=lags, seeds=options.seeds, steps=steps, folder=workers.folder)
        kept = {run: finished.of(config) for run, config in runs.items()}
        results = {run: curves for run, curves in kept.items() if curves is not None}
        if results or not options.jobs:
            print(f"{len(results)} of {len(runs)} runs are in {options.keep}", flush=True)
        remaining = {run: config for run, config in runs.items() if run not in results}
        for run, curves in train_all(workers, remaining, jobs=options.jobs):
            results[run] = curves
            finished.add(run, runs[run], curves)
            name = f"{run.objective}, k = {run.lag}, seed {run.seed}"
            rewards = f"end {curves.end:.2f}, area {curves.area:.2f}  ({curves.seconds:.0f} s)"
            print(f"{len(results):>3}/{len(runs)}  {name:<38} {rewards}", flush=True)
    if not results:
        raise ConfigError(["--jobs 0: no run of this study is kept; name its file (--keep), or train (--jobs 1)"])
    titles = {name: objective.title for name, objective in objectives.items()}
    cells = table(results)
    print(f"{study.title}: reward at the end / area\n\n{markdown(titles, cells, seeds=options.seeds)}")
    for objective, row in cells.items():
        for lag, seeds in row.items():
            name = f"{objective}, k = {lag}"
            end, area = fmean(each.end for each in seeds), fmean(each.area for each in seeds)
            figures.show(Figure(f"{name}, end", end), Figure(f"{name}, area", area))
    if options.plot is not None:
        draw(study.title, titles, cells, options.plot)
    return {
        "overrides": [*SETTINGS, TWO_UPDATES, *study.overrides],
        "objectives": {name: [objective.file.name, *objective.overrides] for name, objective in objectives.items()},
        "runs": [asdict(run) | thinned(curves) for run, curves in results.items()],
    }


def chosen(study: Study, names: Sequence[str] | None) -> dict[str, Objective]:
    """Objectives by name: the study's, or recipes. Raises: ConfigError for names of neither."""
    found, unknown = dict[str, Objective](), []
    for name in study.objectives if names is None else names:
        objective = study.objectives.get(name, recipe(name))
        if objective.file.exists():
            found[name] = objective
        else:
            unknown.append(
                f"--objectives {name}: this study has {', '.join(study.objectives)}; others are the names of recipes "
                f"in {RECIPES}"
            )
    if unknown:
        raise ConfigError(unknown)
    return found


def plan(
    study: Study, objectives: Mapping[str, Objective], *, lags: Sequence[int], seeds: int, steps: int, folder: Path
) -> Plan:
    """Runs with their configurations; those of one seed share their initial weights, which are built in `folder`.

    Raises: ConfigError for recipes that a lag can't be forced on.
    """

    def config(objective: Objective, lag: int, seed: int) -> RunConfig:
        own = (f"run.dir={folder}", f"run.name=seed{seed}", f"run.seed={seed}", f"learner.steps={steps}")
        changes = (*SETTINGS, *study.overrides, *own, f"buffer.max_staleness={lag}")
        updates = (TWO_UPDATES,) if objective.file == DEMO else ()
        return load_config(objective.file, (*changes, *updates, *objective.overrides))

    demo = load_config(DEMO).env.name
    runs: dict[Run, RunConfig] = {}
    problems: dict[str, str] = {}
    for name, objective in objectives.items():
        for run in [Run(name, lag, seed) for seed in range(seeds) for lag in lags]:
            if objective.file != DEMO and load_config(objective.file).env.name != demo:
                problems[name] = f"it has a task of its own, and this is measured on the demo's ({demo})"
                break
            runs[run] = config(objective, run.lag, run.seed)
            if runs[run].buffer.filters or runs[run].greedy_baseline or not runs[run].rollout.sampling.ignore_eos:
                problems[name] = "filters, greedy answers and answers that end by themselves need buffer and servers"
                break
    if problems:
        raise ConfigError([f"--objectives {name}: {problem}" for name, problem in problems.items()])
    # By seeds first: a study that is stopped has a whole table of fewer seeds.
    return dict(sorted(runs.items(), key=lambda item: (item[0].seed, item[0].lag)))


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
