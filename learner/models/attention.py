"""Exact attention within packed sequences on any device, without a T x T mask.

# N sequences of one length L, in B blocks of W; H heads, T packed tokens, D head size, K = 2 W, M = N (B - 1)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.parallel.context import exchanging

NAME = "segments"


def register() -> None:
    """Registers the attention in transformers as `attn_implementation="segments"`.

    It and that of flash-attention also take `context`, for tokens that are split over ranks.
    """
    ALL_ATTENTION_FUNCTIONS.register(NAME, exchanging(segments_attention))
    ALL_ATTENTION_FUNCTIONS.register("flash_attention_2", exchanging(flash_attention_forward))
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, segments_mask)


@dataclass(frozen=True)
class Window:
    """Limit of a token's attention to earlier tokens of its sequence."""

    tokens: int
    """Maximal number, the token itself included."""
    chunked: bool
    """True: only tokens of the same chunk, of so many tokens each."""


def segments_mask(*, config: Any, local_size: int | None = None, **_unused: Any) -> Window | None:
    """The mask that transformers passes to attention: here the layer's window, None if it has none."""
    if local_size is None:
        return None
    return Window(local_size, chunked=getattr(config, "attention_chunk_size", None) == local_size)


def segments_attention(  # noqa: PLR0913  (transformers calls it)
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Window | Tensor | None,
    *,
    segment_lengths: Sequence[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence.

    Args:
        query, key, value: [1, H, T, D]; key and value may have fewer heads.
        attention_mask: the window; None: the whole sequence. Not a tensor: boundaries are in `segment_lengths`.
        segment_lengths: lengths of the packed sequences; they sum to T.
        scaling: factor of the scores, 1/sqrt(D) if None.
        softcap, s_aux: must be None: soft-capped scores and attention sinks are not implemented.

    Returns: [1, T, H, D], and None for the attention weights.

    Raises: ConfigError when the model needs a feature that is not implemented: its log-probs would be wrong.
    """
    if isinstance(attention_mask, Tensor):
        raise ValueError("packed attention takes segment_lengths, not a mask")
    _refuse_unimplemented(module, softcap, s_aux)
    window = attention_mask.tokens if attention_mask is not None else None
    if attention_mask is not None and attention_mask.chunked:
        segment_lengths, window = list(_chunks(segment_lengths, attention_mask.tokens)), None
    pieces = []
    for start, length, count in _runs(segment_lengths):
        # Consecutive sequences of one length are a plain batch; packing sorts by length to make such runs long.
        query_NHLD, key_NHLD, value_NHLD = (
            states[0, :, start : start + length * count].unflatten(1, (count, length)).transpose(0, 1)
            for states in (query, key, value)
        )
        if window is None or length <= window:
            out_NHLD = _causal(query_NHLD, key_NHLD, value_NHLD, scaling, dropout)
        else:
            out_NHLD = _windowed(query_NHLD, key_NHLD, value_NHLD, window, scaling, dropout)
        pieces.append(out_NHLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(pieces).unsqueeze(0), None


def _causal(query_NHLD: Tensor, key_NHLD: Tensor, value_NHLD: Tensor, scaling: float | None, dropout: float) -> Tensor:
    return F.scaled_dot_product_attention(
        query_NHLD,
        key_NHLD,
        value_NHLD,
        dropout_p=dropout,
        is_causal=True,
        scale=scaling,
        enable_gqa=query_NHLD.shape[1] != key_NHLD.shape[1],
    )


def _windowed(
    query_NHLD: Tensor, key_NHLD: Tensor, value_NHLD: Tensor, window: int, scaling: float | None, dropout: float
) -> Tensor:
    """Attention to `window` tokens of longer sequences, in memory that is linear in their length.

    A block of `window` queries attends only to its own keys and those of the block before.
    """
    batch, heads, length, _ = query_NHLD.shape
    # On GPUs only the kernel that materialises all scores supports both a mask and fewer key heads.
    key_NHLD, value_NHLD = (
        states.repeat_interleave(heads // states.shape[1], dim=1) for states in (key_NHLD, value_NHLD)
    )
    query_NBHWD, key_NBHWD, value_NBHWD = (
        F.pad(states, (0, 0, 0, -length % window)).unflatten(2, (-1, window)).transpose(1, 2)
        for states in (query_NHLD, key_NHLD, value_NHLD)
    )
    first_NHWD = _causal(query_NBHWD[:, 0], key_NBHWD[:, 0], value_NBHWD[:, 0], scaling, dropout)
    both_WK = torch.ones(window, 2 * window, dtype=torch.bool, device=query_NHLD.device).tril(window).triu(1)
    key_MHKD, value_MHKD = (
        torch.cat([states[:, :-1], states[:, 1:]], dim=3).flatten(0, 1) for states in (key_NBHWD, value_NBHWD)
    )
    rest_MHWD = F.scaled_dot_product_attention(
        query_NBHWD[:, 1:].flatten(0, 1), key_MHKD, value_MHKD, attn_mask=both_WK, dropout_p=dropout, scale=scaling
    )
    out_NBHWD = torch.cat([first_NHWD[:, None], rest_MHWD.unflatten(0, (batch, -1))], dim=1)
    return out_NBHWD.transpose(1, 2).flatten(2, 3)[:, :, :length]


def _refuse_unimplemented(module: torch.nn.Module, softcap: float | None, s_aux: Tensor | None) -> None:
    name = type(module).__name__
    if softcap is not None:
        raise ConfigError(
            f"learner.attention={NAME}: {name} caps its attention scores at {softcap:g}, which {NAME} can't; "
            "set learner.attention=flash_attention_2"
        )
    if s_aux is not None:
        raise ConfigError(f"model: {name} has attention sinks, which no learner.attention can; choose another model")


def _chunks(lengths: Sequence[int], most: int) -> Iterator[int]:
    """Lengths of the chunks of sequences; only a sequence's last may be shorter than `most`."""
    for length in lengths:
        yield from (min(most, length - start) for start in range(0, length, most))


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first token, length, count) of each run of equal lengths."""
    start = 0
    for length, run in groupby(lengths):
        count = sum(1 for _ in run)
        yield start, length, count
        start += length * count
