"""Attention of one new token per answer to a KV cache, without a copy of the cache for each query head."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# B answers, T tokens in the cache, H query heads, D head size

NAME = "grouped_sdpa"


def use_grouped_attention(model: Any) -> None:
    """Makes a model that uses `sdpa` use the attention of this module."""
    if model.config._attn_implementation == "sdpa":
        ALL_ATTENTION_FUNCTIONS.register(NAME, grouped_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Query heads that share a key head are taken as so many tokens of one head, since all have the same mask.

    With a mask, transformers' own function repeats keys and values for each of them. Returns: shape [B, 1, H, D].
    """
    batch, heads, tokens, size = query.shape
    groups = heads // key.shape[1]
    shared = attention_mask is None or attention_mask.shape[1] == 1
    if tokens > 1 or groups == 1 or position_bias is not None or not shared:
        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, position_bias=position_bias, **options
        )
        return attended
    query = query.reshape(batch, heads // groups, groups, size)
    found = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return found.reshape(batch, 1, heads, value.shape[-1]), None
