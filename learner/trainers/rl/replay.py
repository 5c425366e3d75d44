"""Replay of recorded training steps: without buffer and servers, from checkpoints and the groups' bytes."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec
import torch
from torch import Tensor

from slipstream.buffer.wire.messages import Group
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.learner.checkpoint import restore_checkpoint, save_checkpoint
from slipstream.learner.data.balance import SequenceCost
from slipstream.learner.data.buffer_feed import StepData, balance_step, build_step, group_works, partition_groups
from slipstream.learner.data.images import ImageReader
from slipstream.learner.models.optim import SkippedUpdates
from slipstream.learner.parallel.mesh import World
from slipstream.learner.step_records import StepRecord
from slipstream.learner.trainers.rl.parts import build_train_step
from slipstream.learner.trainers.rl.step import TrainStep
from slipstream.learner.trainers.rl.trainer import RLState

Answer = tuple[str, int | None]
"""A group's id and the index of one of its trajectories, whose whole episode is meant; None: the whole group."""


class NothingLeftError(SlipstreamError):
    """All groups of a step are left out."""


@dataclass
class Replayer:
    """Models, optimizers and the training step of one rank, at any step that has a checkpoint."""

    config: RunConfig
    train_step: TrainStep
    cost: SequenceCost
    """Of sequences under the policy."""
    images: ImageReader | None
    own_kl: bool
    """The KL coefficient follows this configuration; else it is the recorded one."""
    _initial: dict[str, dict[str, Tensor]] = field(init=False)
    """Copies of the initial weights that are trained."""

    @classmethod
    def build(cls, config: RunConfig, path: Path, world: World, *, own_kl: bool = False) -> Self:
        """The replayer of a run whose policy starts from the model in `path`; a collective.

        Raises: ConfigError when the model can't be trained with these settings.
        """
        train_step = build_train_step(config, path, world)
        return cls(config, train_step, SequenceCost.of_model(path), ImageReader.of(path), own_kl)

    def __post_init__(self) -> None:
        self._initial = {
            name: {key: tensor.detach().clone() for key, tensor in model.named_parameters() if tensor.requires_grad}
            for name, (model, _) in self.train_step.trained.items()
        }

    @torch.no_grad()
    def go_to(self, step: int, folder: Path) -> None:
        """Sets weights and optimizers to those of a checkpoint; step 0: to the initial ones. A collective.

        Args:
            folder: of the checkpoints.

        Raises: CheckpointError, on all ranks, when it is damaged, or of other models.
        """
        train_step = self.train_step
        for name, (model, optimizer) in train_step.trained.items():
            optimizer.state.clear()
            for key, tensor in model.named_parameters():
                if tensor.requires_grad:
                    tensor.copy_(self._initial[name][key])
        train_step.skipped = SkippedUpdates(self.config.learner.updates_per_step, self.config.paths.checkpoints)
        state = RLState()
        if step:
            state = restore_checkpoint(folder, step, train_step.trained, train_step.world, RLState)
        if train_step.kl is not None:
            restored = None if self.own_kl else state.kl_coefficient
            train_step.kl.restore(train_step.kl.config.coefficient if restored is None else restored)

    def save(self, folder: Path, step: int) -> None:
        """Writes a checkpoint of the present state, after `step` steps, into another folder; a collective.

        Raises: CheckpointError.
        """
        save_checkpoint(folder, self.train_step.trained, RLState(step=step), self.train_step.world, keep=1)

    def run(
        self, record: StepRecord, groups: Sequence[Group], leave_out: Set[Answer] = frozenset()
    ) -> tuple[dict[str, float], str]:
        """Does a recorded step from the present weights; a collective.

        Args:
            groups: those of the record, in its order.
            leave_out: answers and groups that are not trained on.

        Returns: the step's metrics, and the checksum of the weights after it.

        Raises: NothingLeftError, DivergedError.
        """
        self.train_step.lr_scale = record.lr_scale
        if self.train_step.kl is not None and record.kl_coefficient is not None and not self.own_kl:
            self.train_step.kl.restore(record.kl_coefficient)
        data = self._step_data(record, [without(group, leave_out) for group in groups])
        metrics = self.train_step.run(data, unpublished_steps=record.unpublished_steps)
        return metrics, self.train_step.checksum()

    def _step_data(self, record: StepRecord, groups: Sequence[Group]) -> StepData:
        learner, world, plans = self.config.learner, self.train_step.world, None
        updates, sharing = learner.updates_per_step, self.train_step.sharing
        if world.data_size > 1:
            works = [group_works(group, sharing, token_budget=learner.token_budget) for group in groups]
            assigned, plans = balance_step(works, learner, world, self.cost)
        else:
            assigned = partition_groups(len(groups), updates=updates, rank=0, world_size=1)
        # An update without any group, on all ranks, is none: the optimizer would move the weights all the same.
        per_update = len(groups) // updates
        done = [
            any(group.trajectories for group in groups[n * per_update : (n + 1) * per_update]) for n in range(updates)
        ]
        if not any(done):
            raise NothingLeftError(f"all groups of step {record.step} are left out, so nothing is left to train on")
        return build_step(
            [
                [(groups[index], record.importance_weights[index]) for index in indices if groups[index].trajectories]
                for indices, used in zip(assigned, done, strict=True)
                if used
            ],
            algorithms=self.config.algorithms,
            rewards=self.config.rewards,
            step=record.step - 1,
            consuming_version=record.consuming_version,
            staleness=record.lease.staleness_of,
            images=self.images,
            plans=None if plans is None else [plan for plan, used in zip(plans, done, strict=True) if used],
            sharing=sharing,
        )


def without(group: Group, leave_out: Set[Answer]) -> Group:
    """The group without some of its answers; all trajectories of an episode are left out with one of them."""
    if (group.id, None) in leave_out:
        return msgspec.structs.replace(group, trajectories=[])
    episodes = {each.episode for number, each in enumerate(group.trajectories) if (group.id, number) in leave_out}
    if not episodes:
        return group
    kept = [trajectory for trajectory in group.trajectories if trajectory.episode not in episodes]
    return msgspec.structs.replace(group, trajectories=kept)
