"""A rank's trajectories of one training step as rows of actions, padded to the longest: the input of all objectives.

# B rows (trajectories), T actions of the longest, E episodes, L actions of the longest episode, K reward terms
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.buffer.wire.codec import action_mask, token_ids
from slipstream.buffer.wire.messages import LOGPROB_DTYPE, Group, Trajectory
from slipstream.learner.data.packing import Movable, locate_actions, locate_targets


@dataclass(frozen=True)
class ActionBatch(Movable):
    """One row for each trajectory, in the order in which the groups were assigned; 0 where there is no action.

    The trajectories of an episode stand in the order in which they were generated, not necessarily side by side.
    """

    mask_BT: Tensor
    """1.0 where there is an action; the first columns of a row."""
    behaviour_logprobs_BT: Tensor
    """log μ."""
    versions_BT: Tensor
    """Policy version of each action; -1 where it is unknown, and where there is no action."""
    rewards_BT: Tensor
    """Rewards of single turns at their last actions; the rest of an episode's reward at its last action."""
    turn_BT: Tensor | None
    """Index of each action's turn within its episode, if wanted. A turn is a run of actions without context between."""
    state_BT: Tensor | None
    """Hash of the tokens before each action's turn, from the turn before it, or the trajectory's start; no images."""
    agent_BT: Tensor | None
    """Hash of the label of the agent that each action's answer was given to, if wanted."""
    own_rewards_BT: Tensor | None
    """Own rewards of labelled answers, at their last actions, if wanted."""
    importance_weights_B: Tensor
    """Weight of the row in the losses of policy and critic: that of its group."""
    episode_B: Tensor
    """Index of the row's episode: 0 to E - 1."""
    offset_B: Tensor
    """Number of the episode's actions in the rows before."""
    longest_episode: int
    """L."""
    reward_E: Tensor
    """Total reward of each episode."""
    terms_KE: Tensor
    """Reward terms that are trained on, unweighted."""
    greedy_reward_E: Tensor | None
    """Reward of the greedy answer to the same task, if the tickets asked for one."""
    group_E: Tensor
    """Index of each episode's group: 0 to groups - 1."""
    groups: int
    algorithm_B: Tensor | None = None
    """Index of the algorithm that the row is trained by; None where there is only the learner's."""
    ce_mask_BT: Tensor | None = None
    """1.0 at the targets of the cross-entropy, whose columns follow those of the actions; None without that stream."""

    @property
    def episodes(self) -> int:
        """Number of episodes, E."""
        return len(self.reward_E)

    def own_B1(self, algorithm: int) -> Tensor | None:
        """1.0 in the rows of an algorithm, shape [B, 1]; None if all are."""
        return None if self.algorithm_B is None else (self.algorithm_B == algorithm).to(self.mask_BT.dtype)[:, None]

    def by_episode(self, values_BT: Tensor) -> Tensor:
        """Values of all actions with those of an episode in one row, shape [E, L]; 0 where there is no action."""
        values_EL = values_BT.new_zeros(self.episodes, self.longest_episode)
        row_A, column_A = self.mask_BT.nonzero(as_tuple=True)
        values_EL[self.episode_B[row_A], self.offset_B[row_A] + column_A] = values_BT[row_A, column_A]
        return values_EL

    def by_trajectory(self, values_EL: Tensor) -> Tensor:
        """Inverse of `by_episode`, shape [B, T]; differentiable."""
        row_A, column_A = self.mask_BT.nonzero(as_tuple=True)
        values_A = values_EL[self.episode_B[row_A], self.offset_B[row_A] + column_A]
        return values_EL.new_zeros(self.mask_BT.shape).index_put((row_A, column_A), values_A)


def build_rows(
    groups: Sequence[tuple[Group, float]],
    *,
    terms: Sequence[str],
    turns: bool = False,
    agents: bool = False,
    algorithms: Sequence[int] | None = None,
    targets: Sequence[NDArray[np.bool_]] | None = None,
) -> ActionBatch:
    """The rows of some groups, each with its importance weight.

    Args:
        terms: names of the reward terms that are trained on.
        turns: with turns and their states.
        agents: with the labels of agents and what each earned.
        algorithms: index of each group's algorithm; None: there is only one.
        targets: true at the targets of the cross-entropy among each trajectory's tokens; None without that stream.
    """
    trajectories = [trajectory for group, _ in groups for trajectory in group.trajectories]
    sizes = torch.tensor([len(group.trajectories) for group, _ in groups])
    actions, row, action_index = locate_actions([action_mask(trajectory) for trajectory in trajectories])
    lengths = np.bincount(row, minlength=len(trajectories))
    width, places = int(action_index.max(initial=0)) + 1, None
    if targets is not None:
        places = locate_targets(targets, lengths)[1:]
        width = max(width, int(places[1].max(initial=0)) + 1)

    def padded(values: NDArray[np.float32] | NDArray[np.int64], fill: float) -> Tensor:
        rows = np.full((len(trajectories), width), fill, dtype=values.dtype)
        rows[row, action_index] = values
        return torch.from_numpy(rows)

    keys = [(index, trajectory.episode) for index, (group, _) in enumerate(groups) for trajectory in group.trajectories]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    episode = np.array([numbers[key] for key in keys], dtype=np.int64)
    offset, totals = _offsets(episode, lengths)
    # The trajectories of an episode share reward and scores.
    of_episode = [trajectories[first] for first in np.unique(episode, return_index=True)[1]]
    logprobs = np.frombuffer(b"".join(t.behaviour_logprobs for t in trajectories), dtype=LOGPROB_DTYPE)
    turn_and_state = _turns(trajectories, episode, actions) if turns else None
    labels = _agents(trajectories, actions) if agents else None
    group_E = torch.tensor([group for group, _ in numbers], dtype=torch.long)
    greedy = [group.greedy_reward for group, _ in groups]
    return ActionBatch(
        mask_BT=padded(np.ones(len(actions), dtype=np.float32), 0),
        behaviour_logprobs_BT=padded(logprobs[actions].astype(np.float32), 0),
        versions_BT=padded(_versions(trajectories)[actions], -1),
        rewards_BT=padded(_rewards(trajectories, episode, actions), 0),
        turn_BT=None if turn_and_state is None else padded(turn_and_state[0], 0),
        state_BT=None if turn_and_state is None else padded(turn_and_state[1], 0),
        agent_BT=None if labels is None else padded(labels[0], 0),
        own_rewards_BT=None if labels is None else padded(labels[1], 0),
        importance_weights_B=torch.tensor([weight for _, weight in groups]).float().repeat_interleave(sizes),
        episode_B=torch.from_numpy(episode),
        offset_B=torch.from_numpy(offset),
        longest_episode=max(1, *totals),
        reward_E=torch.tensor([t.reward for t in of_episode], dtype=torch.float32),
        terms_KE=torch.tensor([[t.scores[name] for t in of_episode] for name in terms], dtype=torch.float32).reshape(
            len(terms), len(of_episode)
        ),  # without terms it is [0, E], too
        greedy_reward_E=None if None in greedy else torch.tensor(greedy, dtype=torch.float32)[group_E],
        group_E=group_E,
        groups=len(groups),
        algorithm_B=None if algorithms is None else torch.tensor(algorithms).repeat_interleave(sizes),
        ce_mask_BT=None
        if places is None
        else torch.zeros(len(trajectories), width).index_put_(tuple(map(torch.from_numpy, places)), torch.ones(())),
    )


def _offsets(episode: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[int]]:
    """The number of each row's actions that precede it in its episode, and each episode's number of actions."""
    totals = [0] * (int(episode.max(initial=-1)) + 1)
    offset = np.zeros_like(episode)
    for number, (index, length) in enumerate(zip(episode.tolist(), lengths.tolist(), strict=True)):
        offset[number] = totals[index]
        totals[index] += length
    return offset, totals


def _rewards(
    trajectories: Sequence[Trajectory], episode: NDArray[np.int64], actions: NDArray[np.int64]
) -> NDArray[np.float32]:
    """The reward that arrives at each action, shape [A].

    A turn's reward arrives at the last action before the turn's end. What an episode's turns leave of its reward
    arrives at its last action.
    """
    rewards = np.zeros(len(actions))
    rest: dict[int, tuple[float, int]] = {}
    start = 0
    for index, trajectory in zip(episode.tolist(), trajectories, strict=True):
        length = len(trajectory.action_mask)
        first, end = np.searchsorted(actions, [start, start + length]).tolist()
        left, last = rest.get(index, (trajectory.reward, -1))
        if first < end:
            for turn in trajectory.rewards:
                # A turn before the trajectory's first action is credited to that.
                at = max(first, int(np.searchsorted(actions, start + turn.end)) - 1)
                rewards[at] += turn.value
                left -= turn.value
            last = end - 1
        rest[index] = (left, last)
        start += length
    for left, last in rest.values():
        if last >= 0:
            rewards[last] += left
    return rewards.astype(np.float32)


def _turns(
    trajectories: Sequence[Trajectory], episode: NDArray[np.int64], actions: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Index of each action's turn within its episode, and the hash of the tokens before that turn, both [A]."""
    turns, states = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    played: dict[int, int] = {}
    start = 0
    for index, trajectory in zip(episode.tolist(), trajectories, strict=True):
        ids = token_ids(trajectory)
        first, end = np.searchsorted(actions, [start, start + len(ids)]).tolist()
        own = actions[first:end] - start
        begins = np.flatnonzero(np.diff(own, prepend=-1) > 1)  # a sequence's first token is no action
        context_starts = np.concatenate([[0], own[begins[1:] - 1] + 1])
        hashes = [
            _hash(ids[before:begin].tobytes())
            for before, begin in zip(context_starts.tolist(), own[begins].tolist(), strict=False)
        ]
        turn = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(own)))
        turns.append(turn + played.get(index, 0))
        states.append(np.array(hashes, dtype=np.int64)[turn])
        played[index] = played.get(index, 0) + len(begins)
        start += len(ids)
    return np.concatenate(turns), np.concatenate(states)


def _agents(
    trajectories: Sequence[Trajectory], actions: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Hash of each action's label, 0 without one, and what its answer earned, at the last action; both [A]."""
    labels, rewards = np.zeros(len(actions), dtype=np.int64), np.zeros(len(actions), dtype=np.float32)
    start = 0
    for trajectory in trajectories:
        begin = int(np.searchsorted(actions, start))
        for span in trajectory.agents:
            end = int(np.searchsorted(actions, start + span.end))
            if begin < end:
                labels[begin:end] = _hash(span.agent.encode())
                rewards[end - 1] = span.reward
            begin = end
        start += len(trajectory.action_mask)
    return labels, rewards


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)


def _versions(trajectories: Sequence[Trajectory]) -> NDArray[np.int64]:
    """Policy version of every token of the trajectories end to end; -1 where no span covers it."""
    versions = np.full(sum(len(trajectory.action_mask) for trajectory in trajectories), -1, dtype=np.int64)
    start = 0
    for trajectory in trajectories:
        for span in trajectory.spans:
            versions[start + span.start : start + span.end] = span.version
        start += len(trajectory.action_mask)
    return versions
