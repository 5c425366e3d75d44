"""Replays on one rank, alone or beside others: models are kept for the next replay of the same recording."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from slipstream.configs.load import override_config
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.rl.replay import Answer, Replayer
from slipstream.models.folder import initial_model
from slipstream.tools.rewind.recording import Recording

DEPENDS_ON: Final[Any] = {
    "run": {"seed"},
    "model": True,
    "env": {"name", "options"},  # algorithms of single envs
    "rewards": True,
    "rollout": {"sampling"},
    "learner": True,
    "weights": {"publish_every_steps"},
}
"""Settings that a training step depends on."""


@dataclass(frozen=True)
class Request:
    """Steps to be done once more; see `replay`."""

    first: int
    last: int
    overrides: tuple[str, ...] = ()
    leave_out: frozenset[Answer] = frozenset()


@dataclass(frozen=True)
class ReplayedStep:
    """A step that was done once more, beside its record."""

    step: int
    metrics: dict[str, float]
    checksum: str
    """Of the weights after the step."""
    recorded: dict[str, Any]
    """The metrics then, as in `metrics.jsonl`."""
    recorded_checksum: str

    @property
    def equal(self) -> bool:
        """True if the weights after it have the recorded checksum."""
        return self.checksum == self.recorded_checksum


@dataclass
class Session:
    """One rank's models for replays of a recording."""

    recording: Recording
    world: World
    states: Path
    """Folder for one checkpoint, of all ranks."""
    _state: int = 0
    """Its step; 0: there is none."""
    _replayers: dict[str, Replayer] = field(default_factory=dict)
    """By the settings that a step depends on."""

    def replay(self, request: Request) -> Iterator[ReplayedStep]:
        """Does steps once more; the ones from the checkpoint to the first come too. A collective.

        Raises: ConfigError when an override is wrong, SlipstreamError when a step can't be replayed.
        """
        recording, first, replayer = self.recording, request.first, None
        begin = self._begin(request)
        recording.fetch(range(begin + 1, request.last + 1))
        for step in range(begin + 1, request.last + 1):
            recorded, changed = recording.steps[step], step >= first
            torch.set_num_threads(recorded.start.surroundings.threads)
            following = self._replayer(step, request.overrides if changed else ())
            if replayer is None:
                following.go_to(begin, self.states if begin == self._state else recording.folder.checkpoints)
                if not (changed and request.overrides):
                    self._require_weights(following, begin)
            elif following is not replayer or (step == first and request.leave_out):
                self._keep(replayer, step - 1)
                following.go_to(step - 1, self.states)
            replayer = following
            left_out = request.leave_out if changed else frozenset()
            metrics, checksum = replayer.run(recorded.record, recording.groups(step), left_out)
            yield ReplayedStep(step, metrics, checksum, recording.metrics(step), recorded.record.checksum)

    def _begin(self, request: Request) -> int:
        """The step of the checkpoint to begin with. Raises: SlipstreamError when the steps can't be replayed."""
        checkpoint = self.recording.checkpoint_before(request.first, request.last)
        return max(checkpoint, self._state) if self._state < request.first else checkpoint

    def _replayer(self, step: int, overrides: Sequence[str]) -> Replayer:
        """The replayer with a step's settings, and some changed. Raises: ConfigError."""
        config = self.recording.config(step)
        if overrides:
            config = override_config(config, overrides)
            if problems := [*config.learner.problems(), *config.learner.rl_problems()]:
                raise ConfigError(problems)
        relevant = config.model_dump_json(include=DEPENDS_ON)
        if relevant not in self._replayers:
            own_kl = any(override.startswith("learner.kl") for override in overrides)
            self._replayers[relevant] = Replayer.build(config, initial_model(config), self.world, own_kl=own_kl)
        return self._replayers[relevant]

    def _keep(self, replayer: Replayer, step: int) -> None:
        """Writes the present state of all ranks, in place of an earlier one. Raises: CheckpointError."""
        if self.world.is_root:
            shutil.rmtree(self.states)
            self.states.mkdir()
        self.world.barrier()
        replayer.save(self.states, step)
        self._state = step

    def _require_weights(self, replayer: Replayer, step: int) -> None:
        """Raises: SlipstreamError when a checkpoint or the initial model is not that of the recorded run."""
        steps = self.recording.steps
        start = steps[step + 1].start
        recorded = steps[step].record.checksum if step in steps else start.checksum if start.step == step else None
        found = replayer.train_step.checksum()
        if recorded not in (None, found):
            what = f"the checkpoint of step {step}" if step else "the initial model"
            raise SlipstreamError(
                f"{what} in {self.recording.folder.root} has other weights (checksum {found}) than were recorded "
                f"({recorded}): it was changed, or is of another run"
            )
