"""Group statistics over episodes, each counted once. Groups may differ in size, down to one episode.

# B episodes, G groups
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from slipstream.learner.algorithms.advantages.base import AdvantageInputs


def group_sum(values: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Sum over each episode's group, of the shape [B, ...] of `values`."""
    sums = values.new_zeros(inputs.groups, *values.shape[1:])
    return sums.index_add(0, inputs.group_B, values)[inputs.group_B]


def group_size(inputs: AdvantageInputs) -> Tensor:
    """Number of episodes in each episode's group, shape [B]."""
    return group_sum(inputs.mask_BT.new_ones(len(inputs.group_B)), inputs)


def group_max(values_B: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Greatest value of each episode's group, shape [B]."""
    start_G = values_B.new_full((inputs.groups,), -torch.inf)
    return start_G.scatter_reduce(0, inputs.group_B, values_B, "amax")[inputs.group_B]


def deviations(values_B: Tensor, inputs: AdvantageInputs, weights_B: Tensor | None = None) -> Tensor:
    """Each value less its group's mean, shape [B]; the mean is weighted if there are weights, all of them positive.

    Exactly 0 where the values of a group are all the same.
    """
    # Relative to the group's greatest value: six times 0.1 is not exactly 0.6, and the difference would be scaled up.
    from_max_B = values_B - group_max(values_B, inputs)
    weights_B = torch.ones_like(values_B) if weights_B is None else weights_B
    return from_max_B - group_sum(weights_B * from_max_B, inputs) / group_sum(weights_B, inputs)


def group_std(values_B: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Sample standard deviation (n - 1) of each episode's group, shape [B]; 0 for one episode."""
    squares_B = group_sum(deviations(values_B, inputs).square(), inputs)
    return (squares_B / (group_size(inputs) - 1).clamp(min=1)).sqrt()


EPSILON: Final = 1e-8
"""Added to the variance."""


def whiten(values: Tensor, mask: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8) where the mask is 1.0, else 0; of the shape of `values`.

    Mean and sample variance (n - 1) are over the masked values of all ranks; `total` is called twice.
    """
    # In float64: the float32 mean of many large values is so inexact that equal values would seem to differ.
    sums = torch.stack([mask.sum(dtype=torch.float64), (values * mask).sum(dtype=torch.float64)])
    count, summed = total(sums).unbind()
    # In two passes: mean square less squared mean would cancel where the spread is small beside the mean.
    centred = (values - summed / count) * mask
    variance = total(centred.square().sum(dtype=torch.float64)) / (count - 1).clamp(min=1)
    return centred * (variance + EPSILON).rsqrt()
