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

from slipstream.configs.errors import ConfigError

NAME = "segments"


def register() -> None:
    """Makes the attention known to transformers as `attn_implementation="segments"`."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, segments_attention)


def segments_attention(  # noqa: PLR0913  (transformers calls it)
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segment_lengths: Sequence[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence.

    Args:
        query, key, value: [1, H, T, D]; key and value may have fewer heads.
        attention_mask: must be None: the sequences' boundaries are in `segment_lengths`.
        segment_lengths: lengths of the packed sequences; they sum to T.
        scaling: factor of the scores, 1/sqrt(D) if None.
        sliding_window: how many tokens each one sees, itself included; all before it if None.
        softcap, s_aux: must be None: soft-capped scores and attention sinks are not implemented.

    Returns: [1, T, H, D], and None for the attention weights.

    Raises: ConfigError when the model needs what is not implemented; without it the log-probs would be wrong.
    """
    if attention_mask is not None:
        raise ValueError("packed attention takes segment_lengths, not a mask")
    _refuse_unimplemented(module, softcap, s_aux)
    pieces = []
    for start, length, count in _runs(segment_lengths):
        # A run of sequences of one length is a plain batch: packing sorts by length to make these runs long.
        query_NHLD, key_NHLD, value_NHLD = (
            states[0, :, start : start + length * count].unflatten(1, (count, length)).transpose(0, 1)
            for states in (query, key, value)
        )
        band_LL = _band(length, sliding_window, query.device)
        out_NHLD = F.scaled_dot_product_attention(
            query_NHLD,
            key_NHLD,
            value_NHLD,
            dropout_p=dropout,
            attn_mask=band_LL,
            is_causal=band_LL is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        pieces.append(out_NHLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(pieces).unsqueeze(0), None


def _refuse_unimplemented(module: torch.nn.Module, softcap: float | None, s_aux: Tensor | None) -> None:
    name = type(module).__name__
    if softcap is not None:
        raise ConfigError(
            f"learner.attention={NAME}: {name} caps its attention scores at {softcap:g}, which {NAME} can't; "
            "set learner.attention=flash_attention_2"
        )
    if s_aux is not None:
        raise ConfigError(f"model: {name} has attention sinks, which no learner.attention can; choose another model")


def _band(length: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """What each token of a sequence sees where the window is shorter than the sequence, True at [query, key]."""
    if sliding_window is None or length <= sliding_window:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - sliding_window)


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first token, length, count) of each run of equal lengths."""
    start = 0
    for length, run in groupby(lengths):
        count = sum(1 for _ in run)
        yield start, length, count
        start += length * count
