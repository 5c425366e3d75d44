"""The loop that every trainer shares: resume, steps, checkpoints, stop signals, export.

A trainer defines where batches come from, what an update is and what follows it (see `trainers.rl.trainer`).
"""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from slipstream.configs import RunConfig, agreement
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.signals import GracefulStop, StopRequested
from slipstream.configs.runtime.tracing import span
from slipstream.learner.checkpoint import (
    BackgroundCheckpoint,
    ModelsAndOptimizers,
    TrainState,
    load_checkpoint,
    save_checkpoint,
)
from slipstream.learner.export import export_model
from slipstream.learner.metrics.reporter import Reporter
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.setup import RankSetup
from slipstream.learner.upload import Uploader
from slipstream.models.folder import model_problems

log = get_log("learner.loop")

Batch = TypeVar("Batch")


class TrainedModels(Protocol):
    """Models and optimizers of a trainer."""

    @property
    def model(self) -> nn.Module:
        """The model that is exported at the end."""

    @property
    def trained(self) -> ModelsAndOptimizers:
        """Everything that a checkpoint holds."""

    @property
    def updated(self) -> bool:
        """False if the last update of a model was skipped."""


@dataclass(kw_only=True)
class Trainer(ABC, Generic[Batch]):
    """One rank of a training."""

    config: RunConfig
    initial_model: Path
    """Folder of the initial weights; the exported model has its tokenizer."""
    world: World
    reporter: Reporter | None
    """Rank 0's; None on other ranks."""
    signals: GracefulStop = field(default_factory=GracefulStop)
    state: TrainState = field(default_factory=TrainState)
    saved_step: int = 0
    """Step of the latest complete checkpoint."""
    checkpoint_due: bool = False
    uploads: Uploader | None = field(default=None, init=False)
    """Rank 0's, with `learner.checkpoint.upload`."""
    _writing: BackgroundCheckpoint | None = field(default=None, init=False)
    _checkpoint_group: dist.ProcessGroup | None = field(default=None, init=False)
    """Process group of the threads that write checkpoints."""

    @classmethod
    def problems(cls, config: RunConfig) -> Sequence[str]:
        """Reasons why a run can't be started, found before the ranks have joined."""
        return model_problems(config.model)

    @classmethod
    def rank_settings(cls, config: RunConfig) -> dict[str, str]:
        """Settings that all ranks must share, by name."""
        return agreement.rank_settings(config)

    @classmethod
    def root_waits_s(cls, config: RunConfig) -> float:
        """Longest time for which rank 0 may wait for other processes, and the ranks for it."""
        return 0.0

    @classmethod
    @abstractmethod
    def from_setup(cls, setup: RankSetup) -> Self:
        """The trainer of a rank; a collective. Raises: ConfigError when it can't be built."""

    def run(self) -> None:
        """Trains from the latest checkpoint to the last step, and exports the model.

        Raises: SlipstreamError of the trainer, or when a checkpoint or the model can't be written.

        Exits: 128 + the signal's number, on a stop signal.
        """
        restored = load_checkpoint(self.config.paths.checkpoints, self.models.trained, self.world, type(self.state))
        if restored is not None:
            self.state, self.saved_step = restored, restored.step
            if self.uploads is not None:  # its copy may have been cut off
                self.uploads.checkpoint(restored.step)
        self.start(resumed=restored is not None)
        try:
            self._train()
        except SystemExit:
            unsaved = self.state.step - self.saved_step
            if self.world.is_root and unsaved:
                log.info("steps since the last checkpoint will be repeated", steps=unsaved)
            raise
        self._finish()

    @property
    @abstractmethod
    def models(self) -> TrainedModels:
        """Models and optimizers."""

    @abstractmethod
    def next_batch(self) -> Batch:
        """This rank's part of the next step. Raises: StopRequested."""

    @abstractmethod
    def update(self, batch: Batch) -> dict[str, float]:
        """Trains on a batch; returns the step's metrics over all ranks. A collective. Raises: DivergedError."""

    def start(self, *, resumed: bool) -> None:
        """Called once before the first step. `resumed`: models and `state` are those of a checkpoint."""

    def after_update(self, metrics: Mapping[str, float]) -> Mapping[str, float | int]:
        """Called when `state` counts the step; returns further metrics. Raises: StopRequested."""
        return {}

    def require_sound_model(self) -> None:
        """Called before a checkpoint. Raises: DivergedError, on all ranks, when the model's outputs are not finite."""

    def state_to_save(self) -> TrainState:
        """The state that a checkpoint holds."""
        return self.state

    def checkpoint_saved(self, step: int) -> None:
        """Called when the checkpoint of a step is complete."""

    def finish(self) -> None:
        """Called after the last step and the export, before the reporter is closed."""

    def save(self, *, background: bool = False) -> None:
        """Writes a checkpoint of the present state; a collective. Raises: CheckpointError, DivergedError.

        Args:
            background: return when the state is copied; `finish_checkpoint` is due.
        """
        self.require_sound_model()
        self.finish_checkpoint()
        self.checkpoint_due = False
        self.state = self.state_to_save()
        folder, trained = self.config.paths.checkpoints, self.models.trained
        keep = self.config.learner.checkpoint.keep
        if background:
            group = self._checkpoint_group = self._checkpoint_group or dist.new_group(backend="gloo")
            self._writing = BackgroundCheckpoint(folder, trained, self.state, self.world, keep=keep, group=group)
            return
        save_checkpoint(folder, trained, self.state, self.world, keep=keep)
        self._saved(self.state.step)

    def finish_checkpoint(self) -> None:
        """Waits for a checkpoint that is written in the background; a collective. Raises: CheckpointError."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.finish()
            self._saved(writing.state.step)

    def save_unsaved_steps(self) -> bool:
        """Writes a checkpoint ahead of time, so that a restart need not repeat the steps since the last one.

        Returns: False if there was nothing to save, or it could not be saved.
        """
        before = self.saved_step
        try:
            self.finish_checkpoint()
            if self.state.step > self.saved_step and self.models.updated:
                self.save()
        except SlipstreamError as error:
            log.warning("checkpoint not saved, or not acknowledged", error=str(error))
            return False
        return self.saved_step > before

    def _saved(self, step: int) -> None:
        self.saved_step = step
        self.checkpoint_saved(step)
        if self.uploads is not None:
            self.uploads.checkpoint(step)
        if self.world.is_root:
            log.info("checkpoint saved", step=step)

    def _train(self) -> None:
        try:
            with self.signals.deferred():
                while self.state.step < self.config.learner.steps:
                    with span("step", of=("step", self.state.step + 1), root=self.world.is_root, rank=self.world.rank):
                        self._step()
        except StopRequested as stop:
            self.save_unsaved_steps()
            self._finish_uploads()
            sys.exit(128 + stop.number)
        if self.signals.number:  # received during the last step, which is saved
            self._finish_uploads()
            sys.exit(128 + self.signals.number)

    def _step(self) -> None:
        started = time.perf_counter()
        with span("wait"):
            batch = self.next_batch()
        signal = self.world.largest(self.signals.number)  # ranks receive it at different times
        if signal:
            raise StopRequested(signal)
        if self.reporter is not None:
            self.reporter.step_started()
        batch_ready = time.perf_counter()
        with span("train"):
            metrics = self.update(batch)
        self.state = replace(self.state, step=self.state.step + 1)
        updated = time.perf_counter()
        further = self.after_update(metrics)
        last, checkpoint = self.state.step == self.config.learner.steps, self.config.learner.checkpoint
        self.checkpoint_due |= last or self.state.step % checkpoint.every_steps == 0
        # Otherwise it is delayed, unless this is the last step: these may be models that no update can change any more.
        if self.checkpoint_due and (last or self.models.updated):
            with span("checkpoint"):
                self.save(background=checkpoint.asynchronous and not last)
        elif self._writing is not None and self._writing.is_written():
            self.finish_checkpoint()
        if self.reporter is not None:
            self.reporter.step_finished(
                self.state.step,
                {**metrics, **further},
                wait_s=batch_ready - started,
                train_s=updated - batch_ready,
                step_s=time.perf_counter() - started,
            )

    def _finish_uploads(self) -> None:
        """Waits for what is copied to a store; another signal ends the wait, and the process."""
        if self.uploads is not None:
            self.uploads.finish(deadline_s=self.config.learner.wait_deadline_s)

    def _finish(self) -> None:
        config, model = self.config, self.config.model
        export_model(
            self.initial_model,
            config.paths.export,
            self.models.model,
            self.world,
            dtype=getattr(torch, model.dtype_here),
            adapter=model.lora is not None and model.lora.export == "adapter",
        )
        if self.uploads is not None:
            self.uploads.model()
        self._finish_uploads()
        self.finish()
        if self.reporter is not None:
            self.reporter.close()
        if self.world.is_root:
            log.info("run finished", step=self.state.step, model=str(config.paths.export))
