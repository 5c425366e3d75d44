"""Actions and answers that are too far off policy to be trained on at all.

# B rows (answers), T actions of the longest; log ratios are 0 outside the mask
"""

import math
from collections.abc import Callable

from torch import Tensor

from slipstream.configs.schema.correction import RejectionConfig
from slipstream.learner.correction.ratio import bounded, k2, k3

ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": bounded, "k2": k2, "k3": k3}


def rejected(log_ratio_BT: Tensor, mask_BT: Tensor, rule: RejectionConfig) -> Tensor:
    """1.0 at the actions that a rule leaves out, shape [B, T]; an estimate that is no number is out of bounds.

    `k1` is judged as the log ratio between the logs of its bounds, so that a mean is the ratios' geometric mean.
    """
    estimate_BT = ESTIMATORS[rule.estimator](log_ratio_BT)
    if rule.level == "sequence_sum":
        judged_BT = estimate_BT.sum(-1, keepdim=True)
    elif rule.level == "sequence_mean":
        judged_BT = estimate_BT.sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1)
    else:
        judged_BT = estimate_BT
    low, high = _bounds(rule)
    out_BT = ~((judged_BT >= low) & (judged_BT <= high)) & (mask_BT > 0)
    if rule.level == "sequence_max":
        out_BT = out_BT.any(-1, keepdim=True)
    return out_BT * mask_BT


def vetoed(log_ratio_BT: Tensor, mask_BT: Tensor, bound: float) -> Tensor:
    """1.0 at all actions of the answers that have one whose ratio is below the bound, shape [B, T]."""
    return ~(log_ratio_BT >= math.log(bound)).all(-1, keepdim=True) * mask_BT


def _bounds(rule: RejectionConfig) -> tuple[float, float]:
    """Of the estimate."""
    if rule.estimator != "k1":
        return -math.inf, rule.high
    low = 1 / rule.high if rule.low is None else rule.low
    return math.log(low) if low > 0 else -math.inf, math.log(rule.high)
