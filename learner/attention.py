"""Exact attention over packed sequences on any device: each sequence attends to itself alone, without a T x T mask.

# N sequences of one length L, H heads, T packed tokens, D head size
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "segments"


def register() -> None:
    """Makes the attention known to transformers as `attn_implementation="segments"`."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, segments_attention)


def segments_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segment_lengths: Sequence[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence.

    Args:
        query, key, value: [1, H, T, D]; key and value may have fewer heads.
        attention_mask: must be None: the sequences' boundaries are in `segment_lengths`.
        segment_lengths: lengths of the packed sequences; they sum to T.
        scaling: factor of the scores, 1/sqrt(D) if None.

    Returns: [1, T, H, D], and None for the attention weights.
    """
    if attention_mask is not None:
        raise ValueError("packed attention takes segment_lengths, not a mask")
    pieces = []
    for start, length, count in _runs(segment_lengths):
        # A run of sequences of one length is a plain batch: packing sorts by length to make these runs long.
        query_NHLD, key_NHLD, value_NHLD = (
            states[0, :, start : start + length * count].unflatten(1, (count, length)).transpose(0, 1)
            for states in (query, key, value)
        )
        out_NHLD = F.scaled_dot_product_attention(
            query_NHLD,
            key_NHLD,
            value_NHLD,
            dropout_p=dropout,
            is_causal=True,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        pieces.append(out_NHLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(pieces).unsqueeze(0), None


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first token, length, count) of each run of equal lengths."""
    start = 0
    for length, run in groupby(lengths):
        count = sum(1 for _ in run)
        yield start, length, count
        start += length * count
