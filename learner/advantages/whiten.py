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
    count, summed = total(torch.stack([mask.sum(), (values * mask).sum()])).unbind()
    # The mean comes first, on all ranks, since mean square less squared mean would lose what is small beside the mean.
    centred = (values - summed / count) * mask
    variance = total(centred.square().sum()) / (count - 1).clamp(min=1)
    return centred * (variance + EPSILON).rsqrt()
