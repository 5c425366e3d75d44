"""Exact attention over trees of shared prefixes on CPUs: by parts of the keys, merged by log-sum-exp.

# H heads, T packed tokens, D head size of queries and keys, V of values, L tokens of a part, N nodes of one length
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.learner.data.prefix_tree import SHORT, PrefixTree

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def tree_attention(query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scaling: float) -> Tensor:
    """Causal attention of each token to its own node and all of its ancestors.

    Each node's keys are taken once for all tokens below it, and never copied. The parts of a token's keys are merged by
    the logarithms of their sums of exponentials, as those of blocks in FlashAttention (arXiv 2205.14135).

    Args:
        query, key: [1, H, T, D]; key and value may have fewer heads.
        value: [1, H, T, V].

    Returns: [1, T, H, V].
    """
    size = value.shape[-1]
    # The kernel takes values of the keys' size.
    padded = F.pad(value, (0, query.shape[-1] - size))
    out: Tensor = _TreeAttention.apply(query, key, padded, tree, scaling)  # type: ignore[no-untyped-call]
    return out[..., :size]


@lru_cache(maxsize=8)
def tree_forms(tree: PrefixTree) -> tuple[tuple[PrefixTree, int], ...]:
    """Short trees of one form that follow each other, and their number; consecutive longer trees are one form."""
    forms: list[tuple[PrefixTree, int]] = []
    for short, trees in groupby(tree.trees, key=is_short):
        if short:
            forms += [(form, sum(1 for _ in same)) for form, same in groupby(trees)]
        else:
            forms.append((PrefixTree.joined(trees), 1))
    return tuple(forms)


def is_short(tree: PrefixTree) -> bool:
    """True if attention within a tree is computed for all pairs of its tokens."""
    return sum(tree.lengths) <= SHORT


@lru_cache(maxsize=64)
def visible_pairs(tree: PrefixTree) -> Tensor:
    """True where a query (row) sees a key."""
    place_L = torch.arange(sum(tree.lengths))
    seen_until_L = torch.tensor(tree.ends).repeat_interleave(torch.tensor(tree.lengths))
    return (place_L <= place_L[:, None]) & (place_L[:, None] < seen_until_L)


class _Part(NamedTuple):
    """Queries and their keys in one call of the kernel."""

    queries: slice
    keys: slice
    nodes: int
    """Number of nodes of one length whose queries see their own keys; 0: the keys are those of one ancestor."""


@lru_cache(maxsize=8)
def _parts(tree: PrefixTree) -> tuple[_Part, ...]:
    """The calls for a tree: first those of each token to its own node, then those to ancestors."""
    return (*_own(tree), *_ancestors(tree))


def _own(tree: PrefixTree) -> Iterator[_Part]:
    for length, run in groupby(range(len(tree.lengths)), key=tree.lengths.__getitem__):
        nodes = list(run)
        tokens = slice(tree.starts[nodes[0]], tree.starts[nodes[0]] + length * len(nodes))
        yield _Part(tokens, tokens, len(nodes))


def _ancestors(tree: PrefixTree) -> Iterator[_Part]:
    for start, length, end in zip(tree.starts, tree.lengths, tree.ends, strict=True):
        if end > start + length:
            yield _Part(slice(start + length, end), slice(start, start + length), 0)


class _TreeAttention(torch.autograd.Function):
    """Attention by parts. The backward pass of each part takes output and log-sum-exp of all of them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scaling: float) -> Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        _, heads, tokens, size = query.shape
        out_1THD = query.new_empty(1, tokens, heads, size, dtype=exact)
        sums_1TH = query.new_empty(1, tokens, heads, dtype=exact)
        out_1HTD, sums_1HT = out_1THD.transpose(1, 2), sums_1TH.transpose(1, 2)
        for part in _parts(tree):
            states = (_nodes(query, part.queries, part), _nodes(key, part.keys, part), _nodes(value, part.keys, part))
            own, sums = _forward(*states, 0.0, part.nodes > 0, scale=scaling)
            if part.nodes:
                _nodes(out_1HTD, part.queries, part).copy_(own)
                _nodes(sums_1HT[..., None], part.queries, part).copy_(sums[..., None])
            else:
                merged, before = out_1HTD[:, :, part.queries], sums_1HT[:, :, part.queries]
                merged.lerp_(own.to(exact), torch.sigmoid(sums - before)[..., None])
                torch.logaddexp(before, sums, out=before)
        out_1THD = out_1THD.to(query.dtype)
        ctx.save_for_backward(query, key, value, out_1THD, sums_1TH)
        ctx.tree, ctx.scaling = tree, scaling
        return out_1THD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out_1THD, sums_1TH = ctx.saved_tensors
        grad_1HTD, out_1HTD = gradients[0].transpose(1, 2), out_1THD.transpose(1, 2)
        sums_1HT1 = sums_1TH.transpose(1, 2)[..., None]
        exact = sums_1TH.dtype
        found = [_like(states, exact) for states in (query, key, value)]
        for part in _parts(ctx.tree):
            of_queries = [_nodes(each, part.queries, part) for each in (grad_1HTD, query, out_1HTD, sums_1HT1)]
            grad, queries, out, sums = of_queries
            keys, values = (_nodes(each, part.keys, part) for each in (key, value))
            own = _backward(grad, queries, keys, values, out, sums[..., 0], 0.0, part.nodes > 0, scale=ctx.scaling)
            for total, place, each in zip(found, (part.queries, part.keys, part.keys), own, strict=True):
                target = _nodes(total, place, part)
                if part.nodes:
                    target.copy_(each)
                else:
                    target.add_(each)
        grads = [total.to(states.dtype) for total, states in zip(found, (query, key, value), strict=True)]
        return grads[0], grads[1], grads[2], None, None


def _nodes(states_1HTD: Tensor, tokens: slice, part: _Part) -> Tensor:
    """A view of some tokens, [N, H, L, D]."""
    chosen_HTD = states_1HTD[0, :, tokens]
    of_nodes: Tensor = chosen_HTD.unflatten(1, (max(1, part.nodes), -1))
    return of_nodes.transpose(0, 1)


def _like(states_1HTD: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for gradients, with the tokens outside the heads as in the projections' outputs."""
    _, heads, tokens, size = states_1HTD.shape
    return states_1HTD.new_empty(1, tokens, heads, size, dtype=dtype).transpose(1, 2)
