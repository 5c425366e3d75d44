"""Tensors by the names of their dtypes, which processes exchange."""

from collections.abc import Sequence

import torch
from torch import Tensor


def typed_view(data: Tensor, dtype: str, shape: Sequence[int]) -> Tensor:
    """A tensor in the bytes of a uint8 tensor, without a copy; `dtype` is a name, such as `bfloat16`."""
    return data.view(getattr(torch, dtype)).view(shape)
