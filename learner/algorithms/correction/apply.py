"""The off-policy correction of a step, or of a part of it: what each action weighs, and which are left out.

# B rows (answers), T actions of the longest
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.configs.schema.learner import CorrectionConfig
from slipstream.learner.algorithms.advantages.base import alone
from slipstream.learner.algorithms.correction.behaviour import behaviour_weights, normalised
from slipstream.learner.algorithms.correction.rejection import outliers, rejected, vetoed


@dataclass(frozen=True)
class Correction:
    """All of shape [B, T], without gradient."""

    weights_BT: Tensor
    """Multiplies the loss: the ratio after cap, band and normalisation; 0 outside `mask_BT`."""
    truncated_BT: Tensor
    """1.0 where the cap or the band changed the weight."""
    mask_BT: Tensor
    """1.0 where there is an action that stays in the loss and in its mean. It may be nowhere."""
    masked: dict[str, Tensor]
    """Reason → 1.0 where it leaves an action out: `<level>_<estimator>` of a rejection, `veto`, `second_moment`. The
    rejections and the veto may name the same action; `second_moment` judges only what those leave."""


@torch.no_grad()
def correct(
    log_ratio_BT: Tensor, mask_BT: Tensor, config: CorrectionConfig, total: Callable[[Tensor], Tensor] = alone
) -> Correction:
    """Weighs the actions by their log π_prox/μ, and leaves out what the config wants left out.

    Args:
        mask_BT: 1.0 where there is an action; a row may have none. Rows are whole answers.
        total: sums a tensor over all ranks. A collective, called equally often on each; it is called only for
            `normalise` and `second_moment`, which are over the whole step and so want all its rows at once.
    """
    log_ratio_BT = torch.where(mask_BT > 0, log_ratio_BT, 0.0)
    weights_BT, truncated_BT = behaviour_weights(log_ratio_BT, mask_BT, config)
    masked = {rule.name: rejected(log_ratio_BT, mask_BT, rule) for rule in config.rejections}
    if config.veto is not None:
        masked["veto"] = vetoed(log_ratio_BT, mask_BT, config.veto)
    kept_BT = mask_BT
    for out_BT in masked.values():
        kept_BT = kept_BT * (1 - out_BT)
    if config.second_moment is not None:
        masked["second_moment"] = outliers(log_ratio_BT, kept_BT, config.second_moment, total)
        kept_BT = kept_BT * (1 - masked["second_moment"])
    # Not a product: a weight that is no number must not survive its rejection.
    weights_BT = torch.where(kept_BT > 0, weights_BT, 0.0)
    if config.normalise:
        weights_BT = normalised(weights_BT, kept_BT, config, total)
    return Correction(weights_BT, truncated_BT, kept_BT, masked)
