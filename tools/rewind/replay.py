"""`slipstream replay`: recorded training steps done once more, with the same settings or with others."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from slipstream.configs.load import override_config
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.learner.parallel.mesh import World, join_world, leave_world
from slipstream.learner.trainers.rl.replay import Answer, Replayer
from slipstream.models.folder import initial_model
from slipstream.tools.rewind.recording import Recording

DEPENDS_ON: Final = {
    "run": {"seed"},
    "model": True,
    "rewards": True,
    "rollout": {"sampling"},
    "learner": True,
    "weights": {"publish_every_steps"},
}
"""Settings that a training step depends on."""


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


def replay(
    recording: Recording,
    first: int,
    last: int,
    *,
    overrides: Sequence[str] = (),
    leave_out: Set[Answer] = frozenset(),
    on_step: Callable[[ReplayedStep], None] | None = None,
) -> list[ReplayedStep]:
    """Does the steps from `first` to `last` once more, in this process.

    The steps between the checkpoint before `first` and `first` are done with their own settings, and are not returned.
    A recording that is used again keeps models in memory, and the state before `first` in a temporary folder.

    Args:
        overrides: `key.path=value` texts, settings that differ from the recorded ones.
        leave_out: answers and groups that are not trained on, see `Answer`.
        on_step: called after each step.

    Raises: ConfigError when an override is wrong, SlipstreamError when a step can't be replayed.
    """
    done = []
    for step in Session.of(recording).replay(first, last, overrides, leave_out):
        if step.step >= first:
            done.append(step)
            if on_step is not None:
                on_step(step)
    return done


@dataclass
class Session:
    """Models for replays of one recording, on one rank."""

    recording: Recording
    world: World
    states: Path
    """Temporary folder of one checkpoint."""
    _state: int = 0
    """Its step; 0: there is none."""
    _replayers: dict[str, Replayer] = field(default_factory=dict)
    """By the settings that a replay depends on."""

    @classmethod
    def of(cls, recording: Recording) -> "Session":
        """The recording's session, which lives until that is closed."""
        if recording.session is None:
            recording.cleanup.callback(torch.set_num_threads, torch.get_num_threads())
            world = join_world(recording.config(min(recording.steps)).learner.parallel)
            recording.cleanup.callback(leave_world)
            states = recording.cleanup.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-replay-"))
            recording.session = cls(recording, world, Path(states))
        return recording.session

    def replay(self, first: int, last: int, overrides: Sequence[str], leave_out: Set[Answer]) -> Iterator[ReplayedStep]:
        """Does steps once more, as `replay`; those before `first` come too."""
        steps, replayer = self.recording.steps, None
        begin, folder = self._begin(first, last)
        self.recording.fetch(range(begin + 1, last + 1))
        for step in range(begin + 1, last + 1):
            record, start, changed = steps[step].record, steps[step].start, step >= first
            torch.set_num_threads(start.surroundings.threads)
            following = self._replayer(step, overrides if changed else ())
            if replayer is None:
                following.go_to(begin, folder)
                if not (changed and overrides):
                    self._require_weights(following, begin)
            elif following is not replayer or (step == first and leave_out):
                self._keep(replayer, step - 1)
                following.go_to(step - 1, self.states)
            replayer = following
            groups = self.recording.groups(step)
            metrics, checksum = replayer.run(record, groups, leave_out if changed else frozenset())
            yield ReplayedStep(step, metrics, checksum, self.recording.metrics(step), record.checksum)

    def _begin(self, first: int, last: int) -> tuple[int, Path]:
        """The step of the checkpoint to begin with, and its folder.

        Raises: SlipstreamError when there is none, or steps were not recorded.
        """
        recording = self.recording
        if unknown := [step for step in range(first, last + 1) if step not in recording.steps]:
            known = f"{min(recording.steps)} to {max(recording.steps)}"
            raise SlipstreamError(f"step {unknown[0]} of {recording.folder.root} is not recorded; there are {known}")
        candidates = dict.fromkeys(recording.checkpoints, recording.folder.checkpoints)
        if self._state:
            candidates[self._state] = self.states
        for begin in sorted((step for step in candidates if step < first), reverse=True):
            if all(step in recording.steps for step in range(begin + 1, first)):
                return begin, candidates[begin]
        raise SlipstreamError(f"no checkpoint before step {first} is followed by recorded steps")

    def _replayer(self, step: int, overrides: Sequence[str]) -> Replayer:
        """The replayer with a step's settings, and some changed. Raises: ConfigError."""
        config = self.recording.config(step)
        if overrides:
            config = override_config(config, overrides)
        relevant = config.model_dump_json(include=DEPENDS_ON)
        if relevant not in self._replayers:
            own_kl = any(override.startswith("learner.kl") for override in overrides)
            self._replayers[relevant] = Replayer.build(config, initial_model(config), self.world, own_kl=own_kl)
        return self._replayers[relevant]

    def _keep(self, replayer: Replayer, step: int) -> None:
        shutil.rmtree(self.states)
        replayer.save(self.states, step)
        self._state = step

    def _require_weights(self, replayer: Replayer, step: int) -> None:
        """Raises: SlipstreamError when a checkpoint or the initial model is not that of the recorded run."""
        steps = self.recording.steps
        start = steps[step + 1].start
        recorded = steps[step].record.checksum if step in steps else start.checksum if start.step == step else None
        if recorded not in (None, found := replayer.train_step.checksum()):
            what = f"the checkpoint of step {step}" if step else "the initial model"
            raise SlipstreamError(
                f"{what} in {self.recording.folder.root} has other weights (checksum {found}) than were recorded "
                f"({recorded}): it was changed, or is of another run"
            )
