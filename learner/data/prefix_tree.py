"""Sequences with common prefixes as trees: a prefix that several sequences share is computed once.

# N packed input tokens, S nodes, n input tokens of a sequence
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.learner.data.balance import Work

LEAST_SAVING: Final = 0.2
"""Share of its sequences' tokens that a tree must save; else each of them is computed alone."""
COMPARED: Final = 16
"""A node takes as long as the comparison of so many sequences."""
SHORT: Final = 128
"""Tokens of a tree whose attention is computed as a whole, together with that of others of its form, not by node."""
ROOT: Final = -1

Tokens = NDArray[Any]


@dataclass(frozen=True)
class PrefixSharing:
    """The rule by which prefixes are shared."""

    least_tokens: int
    """A common prefix becomes a node if that saves at least so many tokens: each node costs calls of kernels."""
    least_of_short: int | None = None
    """The same for sequences of at most `SHORT` tokens together, where a node costs no calls; None: they do not."""

    def least(self, tokens: int) -> int:
        """Number of tokens that a node must save among sequences of so many tokens together."""
        short = self.least_of_short if tokens <= SHORT else None
        return self.least_tokens if short is None else short


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

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """Index of each tree's root."""
        return tuple(node for node, parent in enumerate(self.parents) if parent == ROOT)

    @cached_property
    def trees(self) -> tuple["PrefixTree", ...]:
        """Each tree by itself."""
        return tuple(
            PrefixTree(
                self.lengths[first:end],
                tuple(parent if parent == ROOT else parent - first for parent in self.parents[first:end]),
            )
            for first, end in pairwise([*self.roots, len(self.lengths)])
        )

    @classmethod
    def joined(cls, trees: Iterable["PrefixTree"]) -> "PrefixTree":
        """Trees one after another."""
        lengths: list[int] = []
        parents: list[int] = []
        for tree in trees:
            parents += [parent if parent == ROOT else len(lengths) + parent for parent in tree.parents]
            lengths += tree.lengths
        return cls(tuple(lengths), tuple(parents))

    @property
    def work(self) -> Work:
        """Work of a pass over all trees."""
        works = self.works
        return Work(sum(work.tokens for work in works), sum(work.squares for work in works))

    @property
    def works(self) -> list[Work]:
        """Work of a pass over each tree, in the order of their roots."""
        works: list[Work] = []
        for parent, depth, length in zip(self.parents, self.depths, self.lengths, strict=True):
            own = Work(length, (depth + length) ** 2 - depth**2)
            if parent == ROOT:
                works.append(own)
            else:
                works[-1] = Work(works[-1].tokens + own.tokens, works[-1].squares + own.squares)
        return works

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
    placement: Placement
    """Of these sequences by themselves."""

    @classmethod
    def single(cls, index: int, tokens: int) -> "Item":
        """A sequence of so many input tokens."""
        alone = Placement(PrefixTree((tokens,), (ROOT,)), [np.arange(tokens)])
        return cls([index], Work.of_length(tokens), alone)


def shared_items(inputs: Sequence[Tokens], sharing: PrefixSharing | None, *, budget: int) -> list[Item]:
    """Items of some sequences, in the order of their first ones.

    A tree of more than `budget` tokens becomes several, each with a copy of what they share.

    Args:
        inputs: input tokens of each sequence, [n] each.
        sharing: None: nothing is shared.
    """
    items = [Item.single(index, len(tokens)) for index, tokens in enumerate(inputs)]
    if sharing is None or len(items) == 1:
        return items
    most = sum(item.work.tokens for item in items)
    least = sharing.least(most)
    if most < 2 * least or most * COMPARED < len(items) * least:
        return items  # short sequences of a small model
    tree, positions = build_tree(inputs, least_tokens=least)
    members: dict[int, list[int]] = {tree.starts[root]: [] for root in tree.roots}
    for index, places in enumerate(positions):
        members[int(places[0])].append(index)
    found: list[Item] = []
    for (start, indices), own, work in zip(members.items(), tree.trees, tree.works, strict=True):
        if work.tokens <= budget:
            parts = [Item(indices, work, Placement(own, [positions[index] - start for index in indices]))]
        else:
            parts = list(_within_budget(inputs, indices, sharing, budget))
        for part in parts:
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
            chosen = sorted(indices[place] for place in order[first:end])
            placement = build_tree([inputs[index] for index in chosen], least_tokens=sharing.least_tokens)
            # Prefixes that save too little are not shared: there may be a few tokens more.
            if placement.tree.work.tokens <= budget or len(chosen) == 1:
                break
            end -= 1
        yield Item(chosen, placement.tree.work, placement)
        first = end


def place(inputs: Sequence[Tokens], items: Sequence[Item], sharing: PrefixSharing) -> Placement:
    """The trees of a micro-batch's items.

    Trees of different items may have a prefix in common, too.

    Args:
        inputs: input tokens of the items' sequences, [n] each.
    """
    tree = PrefixTree.joined(item.placement.tree for item in items)
    if _share_roots(inputs, items, sharing):
        together = build_tree(inputs, least_tokens=sharing.least_tokens)
        if sum(together.tree.lengths) <= sum(tree.lengths):
            return together
        # Where it branches off elsewhere, each item shares a little less.
    positions: list[NDArray[np.int64]] = []
    for item, start in zip(items, (tree.starts[root] for root in tree.roots), strict=True):
        positions += [start + own for own in item.placement.positions]
    return Placement(tree, positions)


def _share_roots(inputs: Sequence[Tokens], items: Sequence[Item], sharing: PrefixSharing) -> bool:
    """True if roots of several items have a common prefix that is worth a node."""
    firsts = np.cumsum([0] + [len(item.indices) for item in items[:-1]]).tolist()
    roots = [inputs[first][: item.placement.tree.lengths[0]] for first, item in zip(firsts, items, strict=True)]
    tokens = sum(map(len, roots))
    if tokens < 2 * sharing.least_tokens:
        return False
    return sum(build_tree(roots, least_tokens=sharing.least_tokens).tree.lengths) < tokens
