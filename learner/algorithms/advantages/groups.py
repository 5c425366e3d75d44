"""What each answer's group has in common. Groups may differ in size, down to one answer.

# B rows (answers), G groups
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from slipstream.learner.algorithms.advantages.base import AdvantageInputs


def group_sum(values: Tensor, inputs: AdvantageInputs) -> Tensor:
    """The sum over each row's group, of the shape [B, ...] of `values`."""
    sums = values.new_zeros(inputs.groups, *values.shape[1:])
    return sums.index_add(0, inputs.group_B, values)[inputs.group_B]


def group_size(inputs: AdvantageInputs) -> Tensor:
    """How many answers each row's group has, shape [B]."""
    return group_sum(inputs.mask_BT.new_ones(len(inputs.group_B)), inputs)


def group_max(values_B: Tensor, inputs: AdvantageInputs) -> Tensor:
    """The greatest value of each row's group, shape [B]."""
    start_G = values_B.new_full((inputs.groups,), -torch.inf)
    return start_G.scatter_reduce(0, inputs.group_B, values_B, "amax")[inputs.group_B]


def deviations(values_B: Tensor, inputs: AdvantageInputs, weights_B: Tensor | None = None) -> Tensor:
    """Each value less its group's mean, shape [B]; the mean is weighted if there are weights, all of them positive.

    Exactly 0 where the values of a group are all the same.
    """
    # From the group's greatest value on: 0.1 six times does not add up to 0.6, and the rest would then be scaled up.
    from_max_B = values_B - group_max(values_B, inputs)
    weights_B = torch.ones_like(values_B) if weights_B is None else weights_B
    return from_max_B - group_sum(weights_B * from_max_B, inputs) / group_sum(weights_B, inputs)


def group_std(values_B: Tensor, inputs: AdvantageInputs) -> Tensor:
    """The sample standard deviation (n - 1) of each row's group, shape [B]; 0 for one answer."""
    squares_B = group_sum(deviations(values_B, inputs).square(), inputs)
    return (squares_B / (group_size(inputs) - 1).clamp(min=1)).sqrt()


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
