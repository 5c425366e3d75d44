"""Sequences with common prefixes as trees: a prefix that several sequences share is computed once.

# N packed input tokens, S nodes, n input tokens of a sequence
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.learner.data.balance import Work

LEAST_SAVING: Final = 0.1
"""Share of its sequences' tokens that a tree must save; else each of them is computed alone."""
ROOT: Final = -1

Tokens = NDArray[Any]


@dataclass(frozen=True)
class PrefixSharing:
    """The rule by which prefixes are shared."""

    least_tokens: int
    """A common prefix becomes a node if that saves at least so many tokens: each node costs calls of kernels."""


@dataclass(frozen=True)
class PrefixTree:
    """Trees of packed tokens in preorder: each node's tokens follow those of all its ancestors.

    A token sees the earlier ones of its own node and all of its ancestors'.
    """

    lengths: tuple[int, ...]
    """Tokens of each node."""
    parents: tuple[int, ...]
    """Index of each node's parent, which is smaller; `ROOT` if it has none."""

    @classmethod
    def of_sequences(cls, lengths: Sequence[int]) -> "PrefixTree":
        """Sequences that share nothing."""
        return cls(tuple(lengths), (ROOT,) * len(lengths))

    @cached_property
    def height(self) -> int:
        """Tokens of the longest sequence."""
        return max(depth + length for depth, length in zip(self.depths, self.lengths, strict=True))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Packed position of each node's first token."""
        return tuple((np.cumsum(self.lengths) - self.lengths).tolist())

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Number of tokens of each node's ancestors."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + self.lengths[parent])
        return tuple(depths)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Packed position after each node's last descendant."""
        ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        for node in range(len(ends) - 1, -1, -1):  # children are after their parents
            if (parent := self.parents[node]) != ROOT:
                ends[parent] = max(ends[parent], ends[node])
        return tuple(ends)

    @property
    def work(self) -> Work:
        """Work of a pass over all nodes."""
        squares = ((depth + length) ** 2 - depth**2 for depth, length in zip(self.depths, self.lengths, strict=True))
        return Work(sum(self.lengths), sum(squares))

    def padded(self, tokens: int) -> "PrefixTree":
        """The trees and one more of so many tokens, if there are any."""
        return PrefixTree((*self.lengths, tokens), (*self.parents, ROOT)) if tokens else self

    def path(self, node: int) -> list[int]:
        """The ancestors of a node, from the root, and the node itself."""
        path = [node]
        while (parent := self.parents[path[-1]]) != ROOT:
            path.append(parent)
        return path[::-1]


class Placement(NamedTuple):
    """Sequences as trees, and the place of their tokens in them."""

    tree: PrefixTree
    positions: list[NDArray[np.int64]]
    """Packed positions of each sequence's tokens, [n] each."""


def build_tree(inputs: Sequence[Tokens], *, least_tokens: int = 1) -> Placement:
    """The trees of some sequences, the same for the same sequences.

    Args:
        inputs: input tokens of each sequence, [n] each, at least one.
        least_tokens: a common prefix becomes a node if that saves at least so many tokens.
    """
    order, common = _sorted(inputs)
    lengths: list[int] = []
    parents: list[int] = []
    positions = [np.empty(len(tokens), dtype=np.int64) for tokens in inputs]
    waiting = [_Branch(0, len(order), 0, ROOT)]
    packed = 0
    while waiting:
        branch = waiting.pop()
        single = branch.end - branch.first == 1
        shared = len(inputs[order[branch.first]]) if single else int(common[branch.first + 1 : branch.end].min())
        saved = (shared - branch.depth) * (branch.end - branch.first - 1)
        depth, parent = branch.depth, branch.parent
        if shared > depth and (single or saved >= least_tokens):
            for index in order[branch.first : branch.end]:
                positions[index][depth:shared] = np.arange(packed, packed + shared - depth)
            parent = len(lengths)
            lengths.append(shared - depth)
            parents.append(branch.parent)
            packed += shared - depth
            depth = shared
        if not single:
            parts = list(_split(branch, common, shared, depth, parent))
            # The last is taken first: single sequences, the longest ones first, so that equal lengths lie side by side.
            parts.sort(key=lambda part: (part.first + 1 == part.end, len(inputs[order[part.first]])))
            waiting += parts
    return Placement(PrefixTree(tuple(lengths), tuple(parents)), positions)


class _Branch(NamedTuple):
    """Sequences `first` to `end` in sorted order whose first `depth` tokens are in `parent` and its ancestors."""

    first: int
    end: int
    depth: int
    parent: int


def _split(branch: _Branch, common: NDArray[np.int64], shared: int, depth: int, parent: int) -> Iterator[_Branch]:
    """Parts of a branch that have more than `shared` tokens in common; sequences that end there are placed."""
    cuts = branch.first + 1 + np.flatnonzero(common[branch.first + 1 : branch.end] == shared)
    bounds = [branch.first, *cuts.tolist(), branch.end]
    for first, end in pairwise(bounds):
        yield _Branch(first, end, depth, parent)


def _sorted(inputs: Sequence[Tokens]) -> tuple[list[int], NDArray[np.int64]]:
    """Indices of the sequences in lexicographic order, and the length of the prefix that each shares with the last."""
    keys = [tokens.astype(">u4").tobytes() for tokens in inputs]
    order = sorted(range(len(inputs)), key=keys.__getitem__)
    common = np.zeros(len(inputs), dtype=np.int64)
    for place in range(1, len(order)):
        common[place] = _common(inputs[order[place - 1]], inputs[order[place]])
    return order, common


def _common(left: Tokens, right: Tokens) -> int:
    """Length of the common prefix."""
    least = min(len(left), len(right))
    differs = left[:least] != right[:least]
    return int(differs.argmax()) if differs.any() else least


class Item(NamedTuple):
    """Sequences that go into one micro-batch together: those of a tree, or a single one."""

    indices: list[int]
    work: Work


def shared_items(inputs: Sequence[Tokens], sharing: PrefixSharing | None, *, budget: int) -> list[Item]:
    """Items of some sequences, in the order of their first ones.

    A tree of more than `budget` tokens becomes several, each with a copy of what they share.

    Args:
        inputs: input tokens of each sequence, [n] each.
        sharing: None: nothing is shared.
    """
    items = [Item([index], Work.of_length(len(tokens))) for index, tokens in enumerate(inputs)]
    # No pair can save enough; with short sequences and a small model this is the usual case.
    if sharing is None or sum(item.work.tokens for item in items) < 2 * sharing.least_tokens or len(items) == 1:
        return items
    tree, positions = build_tree(inputs, least_tokens=sharing.least_tokens)
    root_of_start = {start: node for node, start in enumerate(tree.starts) if tree.parents[node] == ROOT}
    members: dict[int, list[int]] = {}
    for index, places in enumerate(positions):
        members.setdefault(root_of_start[int(places[0])], []).append(index)
    found: list[Item] = []
    for indices in members.values():
        if len(indices) == 1:
            found.append(items[indices[0]])
            continue
        for part in _within_budget(inputs, indices, sharing, budget):
            alone = sum(items[index].work.tokens for index in part.indices)
            saves = part.work.tokens <= (1 - LEAST_SAVING) * alone
            found += [part] if saves else [items[index] for index in part.indices]
    return sorted(found, key=lambda item: item.indices[0])


def _within_budget(inputs: Sequence[Tokens], indices: list[int], sharing: PrefixSharing, budget: int) -> Iterator[Item]:
    """The sequences as trees of at most `budget` tokens each; a longer sequence is alone."""
    order, common = _sorted([inputs[index] for index in indices])
    first = 0
    while first < len(order):
        end, tokens = first + 1, len(inputs[indices[order[first]]])
        while end < len(order) and tokens + (more := len(inputs[indices[order[end]]]) - int(common[end])) <= budget:
            end, tokens = end + 1, tokens + more
        while True:
            chosen = [indices[place] for place in order[first:end]]
            tree, _ = build_tree([inputs[index] for index in chosen], least_tokens=sharing.least_tokens)
            # Prefixes that save too little are not shared: there may be a few tokens more.
            if tree.work.tokens <= budget or len(chosen) == 1:
                break
            end -= 1
        yield Item(sorted(chosen), tree.work)
        first = end


def place(inputs: Sequence[Tokens], counts: Sequence[int], sharing: PrefixSharing) -> Placement:
    """The trees of a micro-batch's items, which have `counts` sequences each.

    Trees of different items may have a prefix in common, too.
    """
    bounds = np.cumsum([0, *counts]).tolist()
    alone = [build_tree(inputs[first:end], least_tokens=sharing.least_tokens) for first, end in pairwise(bounds)]
    together = build_tree(inputs, least_tokens=sharing.least_tokens)
    if sum(together.tree.lengths) <= sum(sum(each.tree.lengths) for each in alone):
        return together
    # Where it branches off elsewhere, each item shares a little less.
    lengths: list[int] = []
    parents: list[int] = []
    positions: list[NDArray[np.int64]] = []
    for each in alone:
        positions += [sum(lengths) + own for own in each.positions]
        parents += [parent if parent == ROOT else len(lengths) + parent for parent in each.tree.parents]
        lengths += each.tree.lengths
    return Placement(PrefixTree(tuple(lengths), tuple(parents)), positions)
