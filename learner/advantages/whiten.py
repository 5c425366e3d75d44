"""Mean 0 and variance 1 over the whole step, on all ranks together."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

EPSILON: Final = 1e-8
"""Added to the variance."""


def whiten(values: Tensor, mask: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8) where the mask is 1.0, else 0; of the shape of `values`.

    Mean and sample variance (n - 1) are those of all ranks' values under their masks; `total` is called twice.
    """
    # In float64: in float32 the mean of many large values is off by so much that equal ones would seem to differ.
    sums = torch.stack([mask.sum(dtype=torch.float64), (values * mask).sum(dtype=torch.float64)])
    count, summed = total(sums).unbind()
    # The mean comes first, on all ranks, since mean square less squared mean would lose what is small beside the mean.
    centred = (values - summed / count) * mask
    variance = total(centred.square().sum(dtype=torch.float64)) / (count - 1).clamp(min=1)
    return centred * (variance + EPSILON).rsqrt()
