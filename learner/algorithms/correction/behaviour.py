"""The behaviour weight π_prox/μ: what pays for the staleness.

# B rows (answers), T actions of the longest; log ratios are 0 outside the mask
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.configs.schema.learner import CorrectionConfig
from slipstream.learner.algorithms.correction.mismatch import bounded


def behaviour_weights(log_ratio_BT: Tensor, mask_BT: Tensor, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """The weights before normalisation, and 1.0 where cap or band changed them; both [B, T], 0 outside the mask.

    A weight is π_prox/μ of its action, of its whole answer where `weight` is `sequence`, and 1 where that is `none`.

    Source: cap: Espeholt et al. 2018 (IMPALA, arXiv 1802.01561); band: IcePop.
    """
    if config.weight == "none":
        return mask_BT, torch.zeros_like(mask_BT)
    summed_BT = log_ratio_BT.sum(-1, keepdim=True) if config.weight == "sequence" else log_ratio_BT
    ratio_BT = bounded(summed_BT).exp() * mask_BT
    weights_BT = ratio_BT
    if config.band is not None:
        low, high = config.band
        weights_BT = ratio_BT * ((ratio_BT >= low) & (ratio_BT <= high))
    elif config.cap is not None:
        weights_BT = ratio_BT.clamp(max=config.cap)
    return weights_BT, (weights_BT != ratio_BT).to(mask_BT.dtype)


def normalised(
    weights_BT: Tensor, mask_BT: Tensor, config: CorrectionConfig, total: Callable[[Tensor], Tensor]
) -> Tensor:
    """The weights over their mean: of the actions in the mask, or of the answers where `weight` is `sequence`.

    Args:
        weights_BT: 0 outside the mask.
        total: sums a tensor over all ranks.
    """
    if config.weight == "sequence":
        sums = torch.stack([weights_BT.amax(-1).sum(), mask_BT.amax(-1).sum()])
    else:
        sums = torch.stack([weights_BT.sum(), mask_BT.sum()])
    weight, count = total(sums.double())
    # Where every weight is 0 there is nothing to divide.
    return weights_BT * torch.where(weight > 0, count / weight, 1.0).to(weights_BT.dtype)
