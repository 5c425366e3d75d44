"""The loop that every trainer shares, of one that has neither a buffer nor weight updates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.configs import RunConfig
from slipstream.configs.paths import checkpoint_steps
from slipstream.configs.runtime.signals import StopRequested
from slipstream.learner.checkpoint import TrainState
from slipstream.learner.data.packing import MicroBatch, all_actions
from slipstream.learner.metrics.destinations import Row
from slipstream.learner.metrics.reporter import Reporter
from slipstream.learner.metrics.trackers import Record
from slipstream.learner.models.optim import MOST_STEPS_SKIPPED, DivergedError
from slipstream.learner.parallel.fsdp import full_weights
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.setup import SingleModel
from tests.learner.recorded import VOCABULARY
from tests.learner.trainers.next_token import NextToken

STEPS = 5


@dataclass
class Records:
    """A tracker in memory."""

    records: list[Record] = field(default_factory=list)
    closed: bool = False

    def log(self, record: Record) -> None:
        self.records.append(record)

    def add_rows(self, table: str, rows: Callable[[], Sequence[Row]]) -> None:
        raise AssertionError("this trainer has no samples")

    def close(self) -> None:
        self.closed = True


@dataclass(kw_only=True)
class Observed(NextToken):
    """Stops after some steps, and shows what it was started from."""

    tracker: Records
    stop_after: int = STEPS
    started_from: tuple[bool, TrainState] | None = None

    def start(self, *, resumed: bool) -> None:
        self.started_from = resumed, self.state

    def next_batch(self) -> list[MicroBatch]:
        if self.state.step == self.stop_after:
            raise StopRequested(15)
        return super().next_batch()


def trainer(config: RunConfig, world: World, *, stop_after: int = STEPS) -> Observed:
    assert config.model.path is not None
    rng, tracker = np.random.default_rng(0), Records()
    return Observed(
        config=config,
        initial_model=config.model.path,
        world=world,
        reporter=Reporter([tracker], steps=STEPS, started=0.0),
        policy=SingleModel.load(config, config.model.path, world),
        rows=[all_actions(rng.integers(0, VOCABULARY, length)) for length in (12, 9, 7)],
        rows_per_step=3,
        tracker=tracker,
        stop_after=stop_after,
    )


def test_trainer_resumes_and_exports_its_model(
    make_config: Callable[..., RunConfig], world: World, tmp_path: Path
) -> None:
    config = make_config(steps=STEPS, checkpoint={"every_steps": 10})
    first, second = trainer(config, world, stop_after=2), trainer(config, world)
    with pytest.raises(SystemExit) as stopped:
        first.run()
    assert stopped.value.code == 128 + 15
    assert checkpoint_steps(config.paths.checkpoints) == [2]
    second.run()
    assert (first.started_from, second.started_from) == ((False, TrainState()), (True, TrainState(step=2)))
    assert checkpoint_steps(config.paths.checkpoints) == [2, STEPS]
    records = [record for each in (first, second) for record in each.tracker.records if record["kind"] == "step"]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    losses = [float(record["loss"]) for record in records]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
    assert (first.tracker.closed, second.tracker.closed) == (False, True)
    exported = AutoModelForCausalLM.from_pretrained(config.paths.export).get_parameter("lm_head.weight")
    assert torch.equal(exported, dict(full_weights(second.policy.model))["lm_head.weight"])


def test_only_skipped_updates_end_training(make_config: Callable[..., RunConfig], world: World) -> None:
    config = make_config(steps=MOST_STEPS_SKIPPED + 3, checkpoint={"every_steps": 1})
    ruined = trainer(config, world, stop_after=MOST_STEPS_SKIPPED + 3)
    torch.nn.init.constant_(ruined.policy.model.get_parameter("lm_head.weight"), torch.nan)
    with pytest.raises(DivergedError):
        ruined.run()
    assert [record["skipped_updates"] for record in ruined.tracker.records] == list(range(1, MOST_STEPS_SKIPPED))
    assert checkpoint_steps(config.paths.checkpoints) == []
