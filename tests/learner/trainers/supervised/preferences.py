"""Runs of trainers on preferences: rows, configurations, and a program that does several one after the other.

`python -m tests.learner.trainers.supervised.preferences FILE…` is one rank, under torchrun.
"""

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from slipstream.configs import RunConfig
from slipstream.configs.load import load_config
from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.signals import GracefulStop, StopRequested
from slipstream.learner.cli import end_process
from slipstream.learner.metrics.events import EventLog
from slipstream.learner.parallel.mesh import World, join_world
from slipstream.learner.trainers.assemble import find_trainer
from slipstream.learner.trainers.setup import RankSetup
from slipstream.models.folder import initial_model

STEPS = 6
OPTIMIZER = {"lr": 1e-3, "warmup_steps": 0, "final_lr_fraction": 1.0}


def reversal_pairs(count: int) -> list[dict[str, Any]]:
    """Prompts with the right answer and a wrong one of another length."""
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        digits = "".join(rng.choices("0123456789", k=rng.randint(2, 5)))
        wrong = "".join(rng.choices("0123456789", k=rng.randint(1, 6)))
        rows.append({"prompt": f"{digits}r", "chosen": digits[::-1], "rejected": f"{wrong}s", "margin": 0.5})
    return rows


def write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return file


def write_run(folder: Path, name: str, model: Path, trainer: Mapping[str, Any], **learner: Any) -> Path:
    """The configuration file of a run of a trainer."""
    config = {
        "run": {"name": name, "dir": str(folder)}, "model": {"path": str(model), "dtype": "float32"},
        "learner": {
            "trainer": {"rows_per_step": 8, **trainer}, "steps": STEPS, "token_budget": 48, "optimizer": OPTIMIZER,
            "checkpoint": {"every_steps": 2}, **learner,
        },
    }  # fmt: skip
    file = folder / f"{name}.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    return file


def open_trainer(config: RunConfig, world: World, cleanup: ExitStack) -> Any:
    """A rank of the configured trainer."""
    events = EventLog(config.paths.events, started=0.0) if world.is_root else None
    if events is not None:
        cleanup.callback(events.close)
    setup = RankSetup(
        config=config, initial_model=initial_model(config), world=world, signals=GracefulStop(), cleanup=cleanup,
        started=0.0, events=events,
    )  # fmt: skip
    return find_trainer(config.learner.trainer).from_setup(setup)


def run_trainer(file: Path, world: World, *, stop_after: int | None = None) -> RunConfig:
    """Runs a training to its end, or until it gets a stop signal after some steps."""
    config = load_config(file)
    config.paths.checkpoints.mkdir(parents=True, exist_ok=True)
    with ExitStack() as cleanup:
        trainer = open_trainer(config, world, cleanup)
        if stop_after is not None:
            _stop_at(trainer, stop_after)
            with suppress(SystemExit):
                trainer.run()
            trainer.reporter.close()
        else:
            trainer.run()
    return config


def _stop_at(trainer: Any, steps: int) -> None:
    prepare: Callable[[], Any] = trainer.next_batch

    def next_batch() -> Any:
        if trainer.state.step == steps:
            raise StopRequested(15)
        return prepare()

    trainer.next_batch = next_batch


def steps_of(paths: RunPaths) -> dict[int, dict[str, float]]:
    """The records of the steps; of one that was done twice, the last."""
    records = map(json.loads, paths.metrics.read_text(encoding="utf-8").splitlines())
    return {record["step"]: record for record in records if record["kind"] == "step"}


def main() -> None:
    """Runs the trainings of all files."""
    torch.set_num_threads(1)
    world = join_world()
    for file in sys.argv[1:]:
        run_trainer(Path(file), world)
    world.barrier()
    end_process(0)


if __name__ == "__main__":
    main()
