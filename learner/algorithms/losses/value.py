"""What the critic descends.

# B rows (answers) of one micro-batch, T actions of the longest
"""

import torch
from torch import Tensor

from slipstream.learner.algorithms.losses.base import LossTerms


def value_loss(values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, *, clip_range: float | None) -> LossTerms:
    """½·max((V - R)², (clip(V) - R)²), with clip(V) within clip_range of the value before the step's first update.

    Args:
        values_BT: V, with gradient.
        clip_range: None: no clip.

    Returns: terms of which nothing outside the mask may be used.
    """
    error_BT = (values_BT - returns_BT).square()
    if clip_range is None:
        return LossTerms(0.5 * error_BT, torch.zeros_like(error_BT))
    clipped_values_BT = old_values_BT + (values_BT - old_values_BT).clamp(-clip_range, clip_range)
    clipped_error_BT = (clipped_values_BT - returns_BT).square()
    return LossTerms(0.5 * torch.maximum(error_BT, clipped_error_BT), (clipped_error_BT > error_BT).to(error_BT.dtype))
