"""Trajectories become packed micro-batches: sequences end to end, no padding, at most a budget of tokens each.

# N packed input tokens, A actions (tokens that the policy chose), B sequences, T actions of the longest
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from slipstream.buffer.wire.messages import LOGPROB_DTYPE, MASK_DTYPE, TOKEN_DTYPE, Trajectory


@dataclass(frozen=True)
class Movable:
    """What holds tensors."""

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **tensors)


@dataclass(frozen=True)
class MicroBatch(Movable):
    """What one forward and backward pass sees.

    The last token of a sequence is never an input: nothing is predicted from it.
    """

    input_ids_1N: Tensor
    position_ids_1N: Tensor
    segment_lengths: tuple[int, ...]
    action_positions_A: Tensor
    """Packed positions whose logits predict an action."""
    actions_A: Tensor
    """Token ids that the policy chose."""
    rows_B: Tensor
    """Which of the step's rows these sequences are."""
    sequence_A: Tensor
    """Which of these sequences an action is of."""
    turn_A: Tensor
    """The how-manieth action of its sequence it is."""
    width: int
    """T."""

    @property
    def actions(self) -> int:
        """Number of actions."""
        return self.actions_A.numel()

    def padded(self, values_A: Tensor) -> Tensor:
        """One value for each action as rows, shape [B, T], 0 where there is no action; the gradient goes through."""
        empty_BT = values_A.new_zeros(self.rows_B.numel(), self.width)
        return empty_BT.index_put((self.sequence_A, self.turn_A), values_A)

    def put(self, into_BT: Tensor, values_A: Tensor) -> None:
        """Writes one value for each action to its place in a tensor over all of the step's rows."""
        into_BT[self.rows_B[self.sequence_A], self.turn_A] = values_A

    def of_step(self, values_BT: Tensor) -> Tensor:
        """This micro-batch's part of a tensor over all of the step's rows: its rows, and no column beyond T."""
        return values_BT[self.rows_B, : self.width]

    def boundaries(self) -> dict[str, Any]:
        """Where the sequences begin and end, in the words of `segments` and of flash attention."""
        lengths = torch.tensor(self.segment_lengths, device=self.input_ids_1N.device)
        ends = F.pad(lengths.cumsum(0), (1, 0)).int()
        longest = max(self.segment_lengths)
        return {
            "segment_lengths": self.segment_lengths,
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }


def pack(trajectories: Sequence[Trajectory], *, token_budget: int, first_row: int = 0) -> list[MicroBatch]:
    """Packs trajectories, longest first, into as few micro-batches as first-fit finds.

    Args:
        trajectories: at least two tokens each.
        token_budget: most input tokens in one micro-batch; a longer trajectory gets one of its own.
        first_row: the first trajectory's row among the step's; the others follow.
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
    return [_micro_batch([trajectories[i] for i in chosen], [first_row + i for i in chosen]) for chosen in bins]


def all_actions(token_ids: NDArray[np.int64]) -> Trajectory:
    """A trajectory that is there to be scored: each of its tokens but the first is an action."""
    mask = np.ones(len(token_ids), dtype=MASK_DTYPE)
    mask[0] = 0
    return Trajectory(
        token_ids=token_ids.astype(TOKEN_DTYPE).tobytes(),
        action_mask=mask.tobytes(),
        behaviour_logprobs=np.zeros(len(token_ids), dtype=LOGPROB_DTYPE).tobytes(),
        spans=[],
        reward=0.0,
        scores={},
        finish_reason="length",
    )


def empty_micro_batch() -> MicroBatch:
    """A micro-batch of one token and no row: a rank that has run out of work must still join the collectives."""
    nothing = torch.zeros(0, dtype=torch.long)
    return MicroBatch(
        input_ids_1N=torch.zeros(1, 1, dtype=torch.long),
        position_ids_1N=torch.zeros(1, 1, dtype=torch.long),
        segment_lengths=(1,),
        action_positions_A=nothing,
        actions_A=nothing,
        rows_B=nothing,
        sequence_A=nothing,
        turn_A=nothing,
        width=1,
    )


def _micro_batch(trajectories: Sequence[Trajectory], rows: Sequence[int]) -> MicroBatch:
    lengths = np.array([len(trajectory.action_mask) for trajectory in trajectories])
    tokens = np.frombuffer(b"".join(t.token_ids for t in trajectories), dtype=TOKEN_DTYPE)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    is_last = np.zeros(len(tokens), dtype=bool)
    is_last[starts + lengths - 1] = True
    actions, sequence, turn = places_of_actions(trajectories)
    of_token = np.repeat(np.arange(len(trajectories)), lengths)
    return MicroBatch(
        input_ids_1N=torch.from_numpy(tokens[~is_last].astype(np.int64))[None],
        position_ids_1N=torch.from_numpy((np.arange(len(tokens)) - starts[of_token])[~is_last])[None],
        segment_lengths=tuple(int(length) - 1 for length in lengths),
        # The input before an action predicts it; dropping the last inputs shifts positions by the sequence's number.
        action_positions_A=torch.from_numpy(actions - 1 - sequence),
        actions_A=torch.from_numpy(tokens[actions].astype(np.int64)),
        rows_B=torch.tensor(rows),
        sequence_A=torch.from_numpy(sequence),
        turn_A=torch.from_numpy(turn),
        width=int(turn.max(initial=0)) + 1,
    )


def places_of_actions(
    trajectories: Sequence[Trajectory],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Where the actions are, of all trajectories end to end: token, trajectory, and number within the trajectory.

    A trajectory's first token is no action: nothing predicts it.
    """
    lengths = np.array([len(trajectory.action_mask) for trajectory in trajectories])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    mask = np.frombuffer(b"".join(t.action_mask for t in trajectories), dtype=MASK_DTYPE).astype(bool)
    mask[starts] = False
    actions = np.flatnonzero(mask)
    sequence = np.repeat(np.arange(len(trajectories)), lengths)[actions]
    before = np.concatenate([[0], np.cumsum(np.bincount(sequence, minlength=len(trajectories)))[:-1]])
    return actions, sequence, np.arange(len(actions)) - before[sequence]
