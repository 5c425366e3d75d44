"""A rank's answers of one training step as rows of actions, padded to the longest: what all objectives look at.

# B rows (answers), T actions of the longest, K reward terms
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.buffer.wire.codec import action_mask
from slipstream.buffer.wire.messages import LOGPROB_DTYPE, Group, Trajectory
from slipstream.learner.data.packing import Movable, locate_actions


@dataclass(frozen=True)
class Rows(Movable):
    """One row for each answer, in the order in which the groups were dealt; 0 where there is no action."""

    mask_BT: Tensor
    """1.0 where there is an action."""
    behaviour_logprobs_BT: Tensor
    """log μ."""
    versions_BT: Tensor
    """Policy version of each action; -1 where none is known, and where there is no action."""
    reward_B: Tensor
    terms_KB: Tensor
    """Reward terms that are trained on, unweighted."""
    greedy_reward_B: Tensor | None
    """Reward of the greedy answer to the same task, if the tickets asked for one."""
    group_B: Tensor
    """Which group a row is of: 0 to groups - 1."""
    groups: int
    weight_B: Tensor
    """How much the row counts in policy's and critic's loss: 1, or its group's importance weight."""


def build_rows(groups: Sequence[tuple[Group, float]], *, terms: Sequence[str]) -> Rows:
    """The rows of some groups, each with its importance weight.

    Args:
        terms: names of the reward terms that are trained on.
    """
    trajectories = [trajectory for group, _ in groups for trajectory in group.trajectories]
    sizes = torch.tensor([len(group.trajectories) for group, _ in groups])
    actions, row, turn = locate_actions([action_mask(each) for each in trajectories])
    width = int(turn.max(initial=0)) + 1

    def padded(values: NDArray[np.float32] | NDArray[np.int64], fill: float) -> Tensor:
        rows = np.full((len(trajectories), width), fill, dtype=values.dtype)
        rows[row, turn] = values
        return torch.from_numpy(rows)

    logprobs = np.frombuffer(b"".join(t.behaviour_logprobs for t in trajectories), dtype=LOGPROB_DTYPE)
    greedy = [group.greedy_reward for group, _ in groups]
    return Rows(
        mask_BT=padded(np.ones(len(actions), dtype=np.float32), 0),
        behaviour_logprobs_BT=padded(logprobs[actions].astype(np.float32), 0),
        versions_BT=padded(_versions(trajectories)[actions], -1),
        reward_B=torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
        terms_KB=torch.tensor([[t.scores[name] for t in trajectories] for name in terms], dtype=torch.float32),
        greedy_reward_B=None if None in greedy else torch.tensor(greedy, dtype=torch.float32).repeat_interleave(sizes),
        group_B=torch.arange(len(groups)).repeat_interleave(sizes),
        groups=len(groups),
        weight_B=torch.tensor([weight for _, weight in groups], dtype=torch.float32).repeat_interleave(sizes),
    )


def _versions(trajectories: Sequence[Trajectory]) -> NDArray[np.int64]:
    """Policy version of every token of the trajectories end to end; -1 where no span covers it."""
    versions = np.full(sum(len(trajectory.action_mask) for trajectory in trajectories), -1, dtype=np.int64)
    start = 0
    for trajectory in trajectories:
        for span in trajectory.spans:
            versions[start + span.start : start + span.end] = span.version
        start += len(trajectory.action_mask)
    return versions
