"""Token sequences packed into micro-batches: end to end, without padding, at most a budget of tokens each.

# N packed input tokens, A actions (tokens that are scored for a sequence), S scores: an action that several sequences
# share is scored once; B sequences, T actions of the longest, P padding
# M layers with experts, K experts of a token
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from slipstream.learner.data.balance import MicroBatchPlan, first_fit
from slipstream.learner.data.images import SequenceImages
from slipstream.learner.data.prefix_tree import SHORT, Item, Placement, PrefixSharing, PrefixTree, place, shared_items
from slipstream.learner.parallel.context import ContextParallel
from slipstream.learner.parallel.mesh import World


@dataclass(frozen=True)
class TokenSequence:
    """A token sequence and which of its tokens are trained on or scored: in RL those that the policy generated.

    Attributes:
        token_ids: integers, shape [T].
        action_mask: shape [T], true where a token is trained on; that of the first is ignored: nothing predicts it.
        images: of the context; None without any.
        routed_experts: experts of the tokens but the last, shape [T - 1, M, K], -1 where the router chooses; None: it
            chooses everywhere.
        targets: true where a token of the context is a target of the cross-entropy, shape [T]; None: nowhere.
        kept: number of tokens that an action was drawn from, shape [T], 0 for all, and the ids of these, one action's
            after another's; None: all everywhere.
    """

    token_ids: NDArray[Any]
    action_mask: NDArray[Any]
    images: SequenceImages | None = None
    routed_experts: NDArray[np.int16] | None = None
    targets: NDArray[Any] | None = None
    kept: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on another device. To a GPU it goes by pinned memory: the host need not wait for the work queued there."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Movable:
    """A dataclass of tensors."""

    def to(self, device: torch.device) -> Self:
        """A copy on another device."""
        tensors: dict[str, Any] = {
            name: moved(value, device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **tensors)


@dataclass(frozen=True)
class MicroBatch(Movable):
    """Input of one forward and backward pass.

    The last token of a sequence is never an input: nothing is predicted from it.
    """

    input_ids_1N: Tensor
    position_ids_1N: Tensor
    segment_lengths: tuple[int, ...]
    segment_ends: Tensor
    """0 and the end of each segment, int32, for the attentions of GPUs."""
    action_positions_S: Tensor
    """Packed positions whose logits predict an action, ascending."""
    actions_S: Tensor
    """Token ids of these actions."""
    rows_B: Tensor
    """Row of each sequence in the step's batch."""
    sequence_A: Tensor
    """Index of each action's sequence among these."""
    action_index_A: Tensor
    """Index of each action within its sequence; the targets of a sequence follow its actions."""
    width: int
    """T."""
    sequence_tokens: int
    """Input tokens of the sequences; more than N where they share prefixes."""
    tree: PrefixTree | None = None
    """The segments as trees of shared prefixes; None: each segment is a sequence."""
    score_A: Tensor | None = None
    """Index of each action among the scored ones; None: they are the same."""
    is_target_A: Tensor | None = None
    """True where a scored token is not an action but a target of the cross-entropy; None: all are actions."""
    kept_2K: Tensor | None = None
    """Tokens that actions were drawn from: index of the action, in order, and id; an action without any was drawn from
    all. None: all were. Sequences with these, or with targets, share no prefixes."""
    rope_positions_31N: Tensor | None = None
    """Positions in time, height and width, if a sequence has images."""
    pixels_PD: Tensor | None = None
    """Patches of all images, in the order of the sequences."""
    grids_I3: Tensor | None = None
    routed_experts_1NMK: Tensor | None = None
    """Experts to choose, -1 where the router does; None: it does everywhere."""
    padding_tokens: int = 0
    """Number of the last tokens, of no sequence."""
    share: "Share | None" = None
    """Its place in the whole micro-batch, if this is one rank's share of that."""

    @property
    def actions(self) -> int:
        """Number of actions, A."""
        return self.sequence_A.numel()

    @property
    def segment_depths(self) -> tuple[int, ...]:
        """Number of tokens before each segment that it attends to."""
        return (0,) * len(self.segment_lengths) if self.tree is None else self.tree.depths

    def padded(self, values_A: Tensor) -> Tensor:
        """Values of the actions as rows, shape [B, T], 0 where there is no action; differentiable."""
        empty_BT = values_A.new_zeros(self.rows_B.numel(), self.width)
        return empty_BT.index_put((self.sequence_A, self.action_index_A), values_A)

    def put(self, into_BT: Tensor, values_A: Tensor) -> None:
        """Writes values of the actions into a tensor over all rows of the step."""
        into_BT[self.rows_B[self.sequence_A], self.action_index_A] = values_A

    def of_step(self, values_BT: Tensor) -> Tensor:
        """This micro-batch's rows of a tensor over all rows of the step, cut to T columns."""
        return values_BT[self.rows_B, : self.width]

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the forward pass of a transformers model, with or without its head."""
        inputs = {
            "input_ids": self.input_ids_1N,
            "position_ids": self.position_ids_1N,
            # With a cache, attention over packed sequences on a CPU is silently wrong.
            "use_cache": False,
            **self.boundaries(),
        }
        if self.rope_positions_31N is not None:
            inputs |= {
                # With the three directions alone, sequences would attend to each other where attention is by mask.
                "position_ids": torch.cat([self.position_ids_1N[None], self.rope_positions_31N]),
                "pixel_values": self.pixels_PD,
                "image_grid_thw": self.grids_I3,
            }
        if self.routed_experts_1NMK is not None:
            # Taken by the layers of a mixture of experts (see `learner.models.moe`), ignored by others.
            inputs["routed_experts"] = self.routed_experts_1NMK
        if self.padding_tokens:
            inputs["padding_tokens"] = self.padding_tokens  # likewise
        return inputs

    def split(self, context: ContextParallel | None) -> "MicroBatch":
        """This rank's share: a part of the tokens, and the actions that these predict; with None: all.

        The packed tokens are padded to parts of the same length; the padding is one more sequence. Boundaries are those
        of all tokens: attention has these together.
        """
        if context is None:
            return self
        tokens = self.input_ids_1N.shape[1]
        padding = -tokens % context.size
        length = (tokens + padding) // context.size
        own = slice(context.rank * length, (context.rank + 1) * length)
        more_1P = torch.arange(padding, device=self.position_ids_1N.device)[None]
        given = self.routed_experts_1NMK
        limits = torch.tensor([own.start, own.stop], device=self.action_positions_S.device)
        first, last = torch.searchsorted(self.action_positions_S, limits).tolist()
        return replace(
            self,
            input_ids_1N=F.pad(self.input_ids_1N, (0, padding))[:, own],
            position_ids_1N=torch.cat([self.position_ids_1N, more_1P], dim=1)[:, own],
            segment_lengths=(*self.segment_lengths, padding) if padding else self.segment_lengths,
            tree=None if self.tree is None else self.tree.padded(padding),
            segment_ends=F.pad(self.segment_ends, (0, 1), value=tokens + padding) if padding else self.segment_ends,
            action_positions_S=self.action_positions_S[first:last] - own.start,
            actions_S=self.actions_S[first:last],
            **self._actions_of_scores(first, last),
            padding_tokens=min(length, max(0, own.stop - tokens + self.padding_tokens)),
            share=Share(context, first, self.actions_S.numel()),
            routed_experts_1NMK=None if given is None else F.pad(given, (0, 0, 0, 0, 0, padding), value=-1)[:, own],
        )

    def _actions_of_scores(self, first: int, last: int) -> dict[str, Any]:
        """Fields of the actions with these scores, if each action has a score of its own; else none change."""
        if self.score_A is not None:
            return {}
        scores = slice(first, last)
        return {
            "sequence_A": self.sequence_A[scores],
            "action_index_A": self.action_index_A[scores],
            "is_target_A": None if self.is_target_A is None else self.is_target_A[scores],
            "kept_2K": None if self.kept_2K is None else _kept_between(self.kept_2K, first, last),
        }

    def of_whole(self, values_S: Tensor) -> Tensor:
        """Values of all actions of the whole micro-batch, [A], from those that this share scored; differentiable.

        A collective if it is a share.
        """
        if self.share is not None:
            values_S = self.share.context.gather(values_S, start=self.share.first, total=self.share.scored)
        return values_S if self.score_A is None else values_S.index_select(0, self.score_A)

    def boundaries(self) -> dict[str, Any]:
        """Sequence boundaries as keyword arguments of attention, the learner's own and that of flash-attention."""
        longest = max(self.segment_lengths)
        return {
            "segment_lengths": self.segment_lengths,
            "cu_seq_lens_q": self.segment_ends,
            "cu_seq_lens_k": self.segment_ends,
            "max_length_q": longest,
            "max_length_k": longest,
            **({} if self.tree is None else {"tree": self.tree}),
            **({} if self.share is None else {"context": self.share.context}),
        }


@dataclass(frozen=True)
class Share:
    """Place of a rank's share in a micro-batch."""

    context: ContextParallel
    first: int
    """Index of its first scored action in the whole."""
    scored: int
    """Number of scored actions of the whole."""


def pack(
    sequences: Sequence[TokenSequence],
    *,
    token_budget: int,
    first_row: int = 0,
    plan: MicroBatchPlan | None = None,
    sharing: PrefixSharing | None = None,
    groups: Sequence[int] | None = None,
) -> list[MicroBatch]:
    """Packs sequences, longest first, into as few micro-batches as first-fit finds.

    Sorted, sequences of one length lie side by side (see learner.models.attention).

    Args:
        sequences: at least two tokens each.
        token_budget: most input tokens in one micro-batch, shared ones counted once; a longer sequence gets one of its
            own.
        first_row: the first sequence's row in the step's batch; the others follow.
        plan: number and equal costs of the micro-batches, where several ranks train in step.
        sharing: compute common prefixes once, by this rule; None: each sequence is computed alone.
        groups: number of sequences of each group; with a plan, or by the rule for short ones, trees are within one.
    """
    if groups is not None and plan is None and not _share_by_group(sequences, sharing, groups):
        groups = None
    items = share_prefixes(sequences, sharing, token_budget=token_budget, groups=groups)
    works = [item.work for item in items]
    bins = first_fit(works, budget=token_budget) if plan is None else plan.fill(works, budget=token_budget)
    return [_pack_items(sequences, [items[index] for index in chosen], first_row, sharing) for chosen in bins]


def share_prefixes(
    sequences: Sequence[TokenSequence],
    sharing: PrefixSharing | None,
    *,
    token_budget: int,
    groups: Sequence[int] | None = None,
) -> list[Item]:
    """The sequences as trees of shared prefixes, or single; see `pack`.

    Sequences with images, with targets of the cross-entropy, or whose experts or tokens to choose from are given,
    share nothing.
    """
    if any(
        given is not None
        for sequence in sequences
        for given in (sequence.images, sequence.targets, sequence.routed_experts, sequence.kept)
    ):
        sharing = None
    items: list[Item] = []
    first = 0
    for count in [len(sequences)] if groups is None else groups:
        inputs = [sequence.token_ids[:-1] for sequence in sequences[first : first + count]]
        found = shared_items(inputs, sharing, budget=token_budget)
        items += [item._replace(indices=[first + index for index in item.indices]) for item in found]
        first += count
    return items


def _share_by_group(sequences: Sequence[TokenSequence], sharing: PrefixSharing | None, groups: Sequence[int]) -> bool:
    """True if a rule has short trees, and those of single groups are short, which trees of several would not be."""
    if sharing is None or sharing.least_of_short is None:
        return False
    lengths = [len(sequence.token_ids) - 1 for sequence in sequences]
    ends = np.cumsum(groups).tolist()
    return all(sum(lengths[first:end]) <= SHORT for first, end in pairwise([0, *ends]))


def _pack_items(
    sequences: Sequence[TokenSequence], items: Sequence[Item], first_row: int, sharing: PrefixSharing | None
) -> MicroBatch:
    chosen = [index for item in items for index in item.indices]
    own = [sequences[index] for index in chosen]
    placement = None
    if sharing is not None and len(chosen) > len(items):
        inputs = [sequence.token_ids[:-1] for sequence in own]
        placement = place(inputs, items, sharing)
    return _micro_batch(own, [first_row + index for index in chosen], placement)


def all_actions(token_ids: NDArray[Any]) -> TokenSequence:
    """A sequence of which every token but the first is an action."""
    return TokenSequence(token_ids, np.ones(len(token_ids), dtype=bool))


def whole_sequence(token_ids: NDArray[Any]) -> TokenSequence:
    """A sequence that is scored as a whole: its one action stands behind the last token, which is an input too."""
    padded = np.append(token_ids, token_ids[-1:])  # a scalar head does not look at the action
    return TokenSequence(padded, np.arange(len(padded)) == len(token_ids))


def empty_micro_batch() -> MicroBatch:
    """A micro-batch of one token and no row: a rank that has run out of work must still join the collectives."""
    nothing = torch.zeros(0, dtype=torch.long)
    return MicroBatch(
        input_ids_1N=torch.zeros(1, 1, dtype=torch.long),
        position_ids_1N=torch.zeros(1, 1, dtype=torch.long),
        segment_lengths=(1,),
        segment_ends=_ends([1]),
        action_positions_S=nothing,
        actions_S=nothing,
        rows_B=nothing,
        sequence_A=nothing,
        action_index_A=nothing,
        width=1,
        sequence_tokens=0,
        padding_tokens=1,
    )


def aligned(micro_batches: Sequence[MicroBatch], world: World) -> list[MicroBatch]:
    """An update's micro-batches on this rank's device, with empty ones up to the largest number of any rank.

    A collective. Each rank must run the backward pass of all of them, also of the empty ones.
    """
    most = world.largest(len(micro_batches))
    padding = [empty_micro_batch()] * (most - len(micro_batches))
    return [batch.to(world.device) for batch in (*micro_batches, *padding)]


def _micro_batch(sequences: Sequence[TokenSequence], rows: Sequence[int], placement: Placement | None) -> MicroBatch:
    lengths = np.array([len(sequence.token_ids) for sequence in sequences])
    tokens = np.concatenate([sequence.token_ids for sequence in sequences])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    is_last = np.zeros(len(tokens), dtype=bool)
    is_last[starts + lengths - 1] = True
    located = locate_actions([sequence.action_mask for sequence in sequences])
    is_target = None
    if any(each.targets is not None for each in sequences):
        located, is_target = _with_targets(located, sequences)
    actions, sequence, action_index = located
    of_token = np.repeat(np.arange(len(sequences)), lengths)
    inputs, positions = tokens[~is_last].astype(np.int64), (np.arange(len(tokens)) - starts[of_token])[~is_last]
    # The input before an action predicts it; dropping the last inputs shifts positions by the sequence's index.
    predicted_from, action_ids = actions - 1 - sequence, tokens[actions].astype(np.int64)
    sequence_tokens, segment_lengths, score, tree = len(inputs), tuple((lengths - 1).tolist()), None, None
    if placement is not None:
        tree = placement.tree
        segment_lengths = tree.lengths
        placed = np.concatenate(placement.positions)
        first_of = np.unique(placed, return_index=True)[1]
        inputs, positions = inputs[first_of], positions[first_of]
        predicted_from, action_ids, score = _scored_once(placed[predicted_from], action_ids)
    return MicroBatch(
        input_ids_1N=torch.from_numpy(inputs)[None],
        position_ids_1N=torch.from_numpy(positions)[None],
        segment_lengths=segment_lengths,
        segment_ends=_ends(segment_lengths),
        action_positions_S=torch.from_numpy(predicted_from),
        actions_S=torch.from_numpy(action_ids),
        rows_B=torch.tensor(rows),
        sequence_A=torch.from_numpy(sequence),
        action_index_A=torch.from_numpy(action_index),
        width=int(action_index.max(initial=0)) + 1,
        is_target_A=None if is_target is None else torch.from_numpy(is_target),
        kept_2K=_kept(sequences, actions),
        sequence_tokens=sequence_tokens,
        tree=tree,
        score_A=None if score is None else torch.from_numpy(score),
        routed_experts_1NMK=_routed_experts(sequences),
        **_image_inputs(sequences),
    )


def _scored_once(
    positions_A: NDArray[np.int64], actions_A: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Position and token of the distinct actions, by position, [S] each, and the index of each action among them, [A].

    Where sequences branch off, one position predicts several tokens.
    """
    vocabulary = int(actions_A.max(initial=0)) + 1
    distinct_S, score_A = np.unique(positions_A * vocabulary + actions_A, return_inverse=True)
    return distinct_S // vocabulary, distinct_S % vocabulary, score_A.reshape(-1)


def _kept(sequences: Sequence[TokenSequence], actions: NDArray[np.int64]) -> Tensor | None:
    """`MicroBatch.kept_2K`, of actions at these places of the sequences end to end."""
    given = [each.kept for each in sequences if each.kept is not None]
    if not given:
        return None
    none = [np.zeros(len(each.token_ids), dtype=np.int32) for each in sequences]
    counts = np.concatenate(
        [zeros if each.kept is None else each.kept[0] for each, zeros in zip(sequences, none, strict=True)]
    )
    position, ids = np.repeat(np.arange(len(counts)), counts), np.concatenate([ids for _, ids in given])
    own = np.isin(position, actions)  # a sequence's first token is no action
    return torch.from_numpy(np.stack([np.searchsorted(actions, position[own]), ids[own]]).astype(np.int64))


def _kept_between(kept_2K: Tensor, first: int, last: int) -> Tensor:
    """Those of the actions from `first` to before `last`, which are then counted from 0."""
    own_2K = kept_2K[:, (kept_2K[0] >= first) & (kept_2K[0] < last)]
    return torch.stack([own_2K[0] - first, own_2K[1]])


def _ends(lengths: ArrayLike) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _routed_experts(sequences: Sequence[TokenSequence]) -> Tensor | None:
    """Experts of all input tokens; None if all are the router's choice."""
    given = next((sequence.routed_experts for sequence in sequences if sequence.routed_experts is not None), None)
    if given is None:
        return None
    parts = [
        np.full((len(sequence.token_ids) - 1, *given.shape[1:]), -1, dtype=given.dtype)
        if sequence.routed_experts is None
        else sequence.routed_experts
        for sequence in sequences
    ]
    return torch.from_numpy(np.concatenate(parts))[None]


def _image_inputs(sequences: Sequence[TokenSequence]) -> dict[str, Any]:
    """The images of the sequences as fields of a micro-batch; none without images."""
    images = [sequence.images for sequence in sequences if sequence.images is not None]
    if not images:
        return {}
    positions = [
        np.broadcast_to(np.arange(len(sequence.token_ids)), (3, len(sequence.token_ids)))
        if sequence.images is None
        else sequence.images.positions_3T
        for sequence in sequences
    ]
    return {
        "rope_positions_31N": torch.from_numpy(np.concatenate([rope[:, :-1] for rope in positions], axis=1))[:, None],
        "pixels_PD": torch.cat([image.pixels_PD for image in images]),
        "grids_I3": torch.cat([image.grids_I3 for image in images]),
    }


Located = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Of tokens in sequences laid end to end: position, sequence, and index in the sequence's row."""


def _with_targets(located: Located, sequences: Sequence[TokenSequence]) -> tuple[Located, NDArray[np.bool_]]:
    """Actions and targets in the order of their positions, and which are targets."""
    masks = [np.zeros(len(each.action_mask)) if each.targets is None else each.targets for each in sequences]
    targets = locate_targets(masks, np.bincount(located[1], minlength=len(sequences)))
    position, sequence, index = (np.concatenate(each) for each in zip(located, targets, strict=True))
    order = np.argsort(position)
    return (position[order], sequence[order], index[order]), order >= len(located[0])


def locate_targets(masks: Sequence[NDArray[Any]], actions: NDArray[np.int64]) -> Located:
    """Positions of the targets; in the row of a sequence they follow its actions.

    Args:
        masks: true at the targets of each sequence.
        actions: number of actions of each sequence.
    """
    position, sequence, index = locate_actions(masks)
    return position, sequence, actions[sequence] + index


def locate_actions(masks: Sequence[NDArray[Any]]) -> Located:
    """Positions of the actions in sequences laid end to end: token, sequence, and index within the sequence.

    Args:
        masks: action mask of each sequence. A sequence's first token is no action: nothing predicts it.
    """
    lengths = np.array([len(mask) for mask in masks])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    mask = np.concatenate(masks).astype(bool)
    mask[starts] = False
    actions = np.flatnonzero(mask)
    sequence = np.repeat(np.arange(len(masks)), lengths)[actions]
    before = np.concatenate([[0], np.cumsum(np.bincount(sequence, minlength=len(masks)))[:-1]])
    return actions, sequence, np.arange(len(actions)) - before[sequence]
