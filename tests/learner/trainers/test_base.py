"""The loop that every training shares, here a supervised one: it has neither a buffer nor weight updates."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from slipstream.configs import RunConfig
from slipstream.configs.paths import checkpoint_steps
from slipstream.configs.runtime.signals import StopRequested
from slipstream.learner.checkpoint import ModelsAndOptimizers, TrainState
from slipstream.learner.data.packing import MicroBatch, TokenSequence, pack
from slipstream.learner.metrics.reporter import Reporter
from slipstream.learner.metrics.trackers.base import Record
from slipstream.learner.models.load import load_model
from slipstream.learner.models.optim import build_optimizer, descend
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.fsdp import full_weights
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.base import LoopSettings, TrainingLoop
from tests.learner.recorded import VOCABULARY, options_of

STEPS = 5
LENGTHS = (12, 9, 7)


@dataclass
class Policy:
    """A model and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    updated: bool = True

    @property
    def trained(self) -> ModelsAndOptimizers:
        return {"policy": (self.model, self.optimizer)}


@dataclass
class Records:
    """A tracker in memory."""

    records: list[Record] = field(default_factory=list)

    def log(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


@dataclass(kw_only=True)
class SupervisedTraining(TrainingLoop[list[MicroBatch]]):
    """Cross-entropy on the same few sequences in each step; the prompts' tokens are not trained on."""

    config: RunConfig
    policy: Policy
    tracker: Records = field(default_factory=Records)
    stop_after: int = STEPS
    started_from: TrainState | None = None

    def __post_init__(self) -> None:
        self._reporter = Reporter([self.tracker], steps=STEPS, started=0.0)

    @property
    def models(self) -> Policy:
        return self.policy

    @property
    def reporter(self) -> Reporter:
        return self._reporter

    def start(self, found: TrainState | None) -> None:
        self.started_from = found

    def next_batch(self) -> list[MicroBatch]:
        if self.state.step == self.stop_after:
            raise StopRequested(15)
        rng = np.random.default_rng(0)
        sequences = [TokenSequence(rng.integers(0, VOCABULARY, n), np.arange(n) >= n // 3) for n in LENGTHS]
        return pack(sequences, token_budget=16)

    def update(self, batch: list[MicroBatch]) -> dict[str, float]:
        actions, loss = sum(each.actions for each in batch), 0.0
        for each in batch:
            scores = score_actions(self.policy.model, each, temperature=1.0)
            cross_entropy = -scores.logprobs_A.sum() / actions
            torch.autograd.backward(cross_entropy)
            loss += cross_entropy.item()
        descend(self.policy.model, self.policy.optimizer, self.config.learner.optimizer)
        return {"loss": loss}


def training(config: RunConfig, world: World, *, stop_after: int = STEPS) -> SupervisedTraining:
    assert config.model.path is not None
    model = load_model(config.model.path, options_of(config), world)
    return SupervisedTraining(
        settings=LoopSettings(
            steps=config.learner.steps,
            checkpoint=config.learner.checkpoint,
            evaluation=config.eval,
            paths=config.paths,
            initial_model=config.model.path,
            export_dtype=torch.float32,
        ),
        world=world,
        config=config,
        policy=Policy(model, build_optimizer(model, config.learner.optimizer)),
        stop_after=stop_after,
    )


def test_supervised_training_resumes_and_exports_its_model(
    make_config: Callable[..., RunConfig], world: World, tmp_path: Path
) -> None:
    config = make_config(steps=STEPS, checkpoint={"every_steps": 10})
    first, second = training(config, world, stop_after=2), training(config, world)
    with pytest.raises(SystemExit) as stopped:
        first.run()
    assert stopped.value.code == 128 + 15
    assert checkpoint_steps(config.paths.checkpoints) == [2]
    second.run()
    assert second.started_from == TrainState(step=2)
    assert checkpoint_steps(config.paths.checkpoints) == [2, STEPS]
    records = first.tracker.records + second.tracker.records
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    losses = [float(record["loss"]) for record in records]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
    exported = AutoModelForCausalLM.from_pretrained(config.paths.export).get_parameter("lm_head.weight")
    assert torch.equal(exported, dict(full_weights(second.policy.model))["lm_head.weight"])


@pytest.mark.parametrize(
    ("tasks", "every", "evaluated"), [(8, 2, [0, 2, 4, 5]), (8, 0, [0, 5]), (0, 2, [])], ids=["every", "ends", "none"]
)
def test_evaluations_are_due(
    tasks: int, every: int, evaluated: list[int], make_config: Callable[..., RunConfig], world: World
) -> None:
    base = make_config(steps=STEPS)
    evaluation = base.eval.model_copy(update={"tasks": tasks, "every_steps": every})
    loop = training(base.model_copy(update={"eval": evaluation}), world)
    assert [step for step in range(STEPS + 1) if loop.evaluates_after(step)] == evaluated
