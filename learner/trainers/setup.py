"""Parts of any trainer: the settings and the rank that it starts on, its reporter, and a model with its optimizer."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import torch
from pydantic import ValidationError
from torch import nn

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.signals import GracefulStop
from slipstream.configs.schema.base import Section
from slipstream.configs.schema.learner import LearnerConfig
from slipstream.learner.checkpoint import ModelsAndOptimizers
from slipstream.learner.metrics.efficiency import Efficiency
from slipstream.learner.metrics.events import EventLog
from slipstream.learner.metrics.reporter import Reporter
from slipstream.learner.metrics.trackers import Tracker, build_trackers
from slipstream.learner.models.flops import peak_flops_per_s
from slipstream.learner.models.load import ModelOptions, load_model
from slipstream.learner.models.optim import (
    SkippedUpdates,
    build_optimizer,
    learning_rate,
    optimizer_step,
    set_learning_rate,
)
from slipstream.learner.parallel.mesh import World
from slipstream.models.device_memory import gpu_id
from slipstream.models.gpus import PowerMeter

log = get_log("learner.step")

Options = TypeVar("Options", bound=Section)


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """A rank that has joined the others, and what its trainer is built from."""

    config: RunConfig
    initial_model: Path
    """Folder of the initial weights."""
    world: World
    signals: GracefulStop
    """Stop signals of this process."""
    cleanup: ExitStack
    """Closes what the trainer has opened."""
    started: float
    """Start of the run, by this host's monotonic clock, which all its processes share."""
    events: EventLog | None = None
    """Rank 0's; None on other ranks."""
    undo_steps: bool = False
    """The command line has `--undo-steps`."""

    def read_options(self, section: type[Options]) -> Options:
        """`learner.trainer.options` of a plug-in as a section of its own. Raises: ConfigError, with all mistakes."""
        try:
            return section.model_validate(self.config.learner.trainer.arguments)
        except ValidationError as error:
            raise ConfigError(
                [
                    f"{'.'.join(['learner.trainer.options', *map(str, detail['loc'])])}: {detail['msg']}"
                    for detail in error.errors(include_url=False)
                ]
            ) from None

    def build_trackers(self) -> list[Tracker]:
        """The configured trackers. Raises: ConfigError when one is not installed."""
        config = self.config
        recorded = config.model_dump(mode="json")
        return build_trackers(config.paths, config.tracking, run=config.run.name, recorded=recorded)

    def build_reporter(self) -> Reporter | None:
        """A reporter on rank 0, None on others. Raises: as `build_trackers`."""
        if not self.world.is_root:
            return None
        return Reporter(self.build_trackers(), steps=self.config.learner.steps, started=self.started)


def build_efficiency(config: RunConfig, world: World, gpus: Sequence[str]) -> Efficiency:
    """Metrics of the use of the ranks' GPUs; `gpus` are their identities, empty for a CPU."""
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
    return Efficiency(
        ranks=world.size,
        gpus={gpu for gpu in gpus if gpu},
        peak_flops_per_s=peak_flops_per_s(name, config.model.dtype_here),
        price_per_gpu_hour=config.tracking.price_per_gpu_hour,
        mean_power_w=PowerMeter(gpu_id(world.device)).mean_w,
    )


@dataclass
class SingleModel:
    """Models and optimizers of a trainer that trains one model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    learner: LearnerConfig
    skipped: SkippedUpdates

    @classmethod
    def load(cls, config: RunConfig, path: Path, world: World) -> Self:
        """The run's model with the weights in `path`, and its optimizer; a collective.

        Raises: ConfigError, on all ranks, when it can't be trained.
        """
        torch.manual_seed(config.run.seed)
        return cls.of(config, load_model(path, ModelOptions.of(config.model, config.learner), world))

    @classmethod
    def of(cls, config: RunConfig, model: nn.Module) -> Self:
        """A loaded model and its optimizer."""
        skipped = SkippedUpdates(updates_per_step=1, checkpoints=config.paths.checkpoints)
        return cls(model, build_optimizer(model, config.learner.optimizer), config.learner, skipped)

    @property
    def trained(self) -> ModelsAndOptimizers:
        """The model and its optimizer, for checkpoints."""
        return {"policy": (self.model, self.optimizer)}

    @property
    def updated(self) -> bool:
        """False if the last update was skipped."""
        return not self.skipped.latest

    def update(self, step: int) -> dict[str, float]:
        """One optimizer update along the gradients, which it clears; a collective.

        Args:
            step: 0-based number of the training step.

        Returns: `lr`, `grad_norm` before clipping, and `skipped_updates` since the learner's start.

        Raises: DivergedError, on all ranks, when the model is not updated any more.
        """
        lr = learning_rate(step, steps=self.learner.steps, config=self.learner.optimizer)
        set_learning_rate(self.optimizer, lr)
        norm = optimizer_step(self.model, self.optimizer, self.learner.optimizer)
        self.skipped.observe("grad_norm", norm)
        if self.skipped.latest:
            log.warning("update skipped: its gradient is not finite", step=step)
            self.skipped.require_updates()
        return {"lr": lr, "grad_norm": float(norm), "skipped_updates": self.skipped.count}
