"""Group statistics over episodes, each counted once, and whitening. Groups may differ in size, down to one episode.

# B episodes, G groups
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """The groups of some episodes; statistics have a row for each episode."""

    index_B: Tensor
    """Index of each episode's group: 0 to count - 1."""
    count: int

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each episode's group, of the shape [B, ...] of `values`."""
        sums = values.new_zeros(self.count, *values.shape[1:])
        return sums.index_add(0, self.index_B, values)[self.index_B]

    def size(self, dtype: torch.dtype) -> Tensor:
        """Number of episodes in each episode's group, shape [B]."""
        return self.sum(torch.ones_like(self.index_B, dtype=dtype))

    def max(self, values_B: Tensor) -> Tensor:
        """Greatest value of each episode's group, shape [B]."""
        start_G = values_B.new_full((self.count,), -torch.inf)
        return start_G.scatter_reduce(0, self.index_B, values_B, "amax")[self.index_B]

    def deviations(self, values_B: Tensor, weights_B: Tensor | None = None) -> Tensor:
        """Each value less its group's mean, shape [B]; the mean is weighted if there are weights, all of them positive.

        Exactly 0 where the values of a group are all the same.
        """
        # Relative to the greatest value: six times 0.1 is not exactly 0.6, and the difference would be scaled up.
        from_max_B = values_B - self.max(values_B)
        weights_B = torch.ones_like(values_B) if weights_B is None else weights_B
        return from_max_B - self.sum(weights_B * from_max_B) / self.sum(weights_B)

    def std(self, values_B: Tensor) -> Tensor:
        """Sample standard deviation (n - 1) of each episode's group, shape [B]; 0 for one episode."""
        squares_B = self.sum(self.deviations(values_B).square())
        return (squares_B / (self.size(values_B.dtype) - 1).clamp(min=1)).sqrt()


EPSILON: Final = 1e-8
"""Added to the variance."""


def whiten(values: Tensor, mask: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8) where the mask is 1.0, else 0; of the shape of `values`.

    Mean and sample variance (n - 1) are over the masked values of all ranks; `total` is called twice.
    """
    # In float64: the mean of many large values is so inexact in float32 that equal values would deviate from it.
    sums = torch.stack([mask.sum(dtype=torch.float64), (values * mask).sum(dtype=torch.float64)])
    count, summed = total(sums).unbind()
    # In two passes: mean square less squared mean would cancel where the spread is small beside the mean.
    centred = (values - summed / count) * mask
    variance = total(centred.square().sum(dtype=torch.float64)) / (count - 1).clamp(min=1)
    return centred * (variance + EPSILON).rsqrt()
