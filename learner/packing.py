"""Trajectories become packed micro-batches: sequences end to end, no padding, at most a budget of tokens each.

# T packed input tokens, A actions (tokens that the policy chose)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from slipstream.buffer.wire.messages import LOGPROB_DTYPE, MASK_DTYPE, TOKEN_DTYPE, Trajectory


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass sees.

    The last token of a sequence is never an input: nothing is predicted from it.
    """

    input_ids_1T: Tensor
    position_ids_1T: Tensor
    segment_lengths: tuple[int, ...]
    action_positions_A: Tensor
    """Packed positions whose logits predict an action."""
    actions_A: Tensor
    """Token ids that the policy chose."""
    behaviour_logprobs_A: Tensor
    """log μ of the actions."""
    advantages_A: Tensor
    versions_A: Tensor
    """Policy version that each action came from."""

    @property
    def actions(self) -> int:
        """Number of actions."""
        return self.actions_A.numel()

    def boundaries(self) -> dict[str, Any]:
        """Where the sequences begin and end, in the words of `segments` and of flash attention."""
        lengths = torch.tensor(self.segment_lengths, device=self.input_ids_1T.device)
        ends = F.pad(lengths.cumsum(0), (1, 0)).int()
        longest = max(self.segment_lengths)
        return {
            "segment_lengths": self.segment_lengths,
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def to(self, device: torch.device) -> "MicroBatch":
        """The same micro-batch on another device."""
        return MicroBatch(
            input_ids_1T=self.input_ids_1T.to(device),
            position_ids_1T=self.position_ids_1T.to(device),
            segment_lengths=self.segment_lengths,
            action_positions_A=self.action_positions_A.to(device),
            actions_A=self.actions_A.to(device),
            behaviour_logprobs_A=self.behaviour_logprobs_A.to(device),
            advantages_A=self.advantages_A.to(device),
            versions_A=self.versions_A.to(device),
        )


def pack(trajectories: Sequence[Trajectory], advantages: NDArray[np.float32], *, token_budget: int) -> list[MicroBatch]:
    """Packs trajectories, longest first, into as few micro-batches as first-fit finds.

    Args:
        trajectories: at least two tokens each.
        advantages: one per trajectory, spread over its actions.
        token_budget: most input tokens in one micro-batch; a longer trajectory gets one of its own.
    """
    lengths = [len(trajectory.action_mask) - 1 for trajectory in trajectories]
    bins: list[list[int]] = []
    room: list[int] = []
    # Sorted, so that sequences of one length lie side by side (see learner.attention).
    for index in sorted(range(len(trajectories)), key=lambda i: -lengths[i]):
        fitting = next((n for n, left in enumerate(room) if lengths[index] <= left), None)
        if fitting is None:
            bins.append([index])
            room.append(token_budget - lengths[index])
        else:
            bins[fitting].append(index)
            room[fitting] -= lengths[index]
    return [_micro_batch([trajectories[i] for i in chosen], advantages[chosen]) for chosen in bins]


def empty_micro_batch() -> MicroBatch:
    """A micro-batch of one token and no action: a rank that has run out of work must still join the collectives."""
    nothing = torch.zeros(0)
    return MicroBatch(
        input_ids_1T=torch.zeros(1, 1, dtype=torch.long),
        position_ids_1T=torch.zeros(1, 1, dtype=torch.long),
        segment_lengths=(1,),
        action_positions_A=nothing.long(),
        actions_A=nothing.long(),
        behaviour_logprobs_A=nothing,
        advantages_A=nothing,
        versions_A=nothing.long(),
    )


def _micro_batch(trajectories: Sequence[Trajectory], advantages: NDArray[np.float32]) -> MicroBatch:
    lengths = np.array([len(trajectory.action_mask) for trajectory in trajectories])
    tokens = np.frombuffer(b"".join(t.token_ids for t in trajectories), dtype=TOKEN_DTYPE)
    mask = np.frombuffer(b"".join(t.action_mask for t in trajectories), dtype=MASK_DTYPE).astype(bool)
    logprobs = np.frombuffer(b"".join(t.behaviour_logprobs for t in trajectories), dtype=LOGPROB_DTYPE)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    is_last = np.zeros(len(tokens), dtype=bool)
    is_last[starts + lengths - 1] = True
    is_first = np.zeros(len(tokens), dtype=bool)
    is_first[starts] = True
    # The input before each action predicts it; dropping the last inputs shifts positions by the sequence's number.
    actions = np.flatnonzero(mask & ~is_first)
    sequence = np.repeat(np.arange(len(trajectories)), lengths)
    return MicroBatch(
        input_ids_1T=torch.from_numpy(tokens[~is_last].astype(np.int64))[None],
        position_ids_1T=torch.from_numpy((np.arange(len(tokens)) - starts[sequence])[~is_last])[None],
        segment_lengths=tuple(int(length) - 1 for length in lengths),
        action_positions_A=torch.from_numpy(actions - 1 - sequence[actions]),
        actions_A=torch.from_numpy(tokens[actions].astype(np.int64)),
        behaviour_logprobs_A=torch.from_numpy(logprobs[actions]),
        advantages_A=torch.from_numpy(advantages[sequence[actions]]),
        versions_A=torch.from_numpy(_versions(trajectories, starts, len(tokens))[actions]),
    )


def _versions(trajectories: Sequence[Trajectory], starts: NDArray[np.int64], tokens: int) -> NDArray[np.int64]:
    """Policy version of every token; -1 where no span covers it."""
    versions = np.full(tokens, -1, dtype=np.int64)
    for start, trajectory in zip(starts, trajectories, strict=True):
        for span in trajectory.spans:
            versions[start + span.start : start + span.end] = span.version
    return versions
