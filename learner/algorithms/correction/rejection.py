"""Rejection of actions and trajectories that are too far off policy.

Sequence-level rules apply to each trajectory; those of one episode may differ.

# B rows (trajectories), T actions of the longest; log ratios are 0 outside the mask
"""

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from slipstream.configs.schema.learner import RejectionConfig
from slipstream.learner.algorithms.correction.mismatch import LOG_BOUND, bounded, k2, k3

ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": bounded, "k2": k2, "k3": k3}


def rejected(log_ratio_BT: Tensor, mask_BT: Tensor, rule: RejectionConfig) -> Tensor:
    """1.0 at the actions that a rule rejects, shape [B, T]; a NaN estimate is out of bounds.

    The bounds of `k1` are of the ratio. The log ratio is compared with their logs, so a mean is the geometric mean of
    the ratios.
    """
    estimate_BT = ESTIMATORS[rule.estimator](log_ratio_BT)
    if rule.level == "sequence_sum":
        statistic_BT = estimate_BT.sum(-1, keepdim=True)
    elif rule.level == "sequence_mean":
        statistic_BT = estimate_BT.sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1)
    else:
        statistic_BT = estimate_BT
    low, high = _bounds(rule)
    out_BT = ~((statistic_BT >= low) & (statistic_BT <= high)) & (mask_BT > 0)
    if rule.level == "sequence_max":
        out_BT = out_BT.any(-1, keepdim=True)
    return out_BT * mask_BT


def vetoed(log_ratio_BT: Tensor, mask_BT: Tensor, bound: float) -> Tensor:
    """1.0 at all actions of the trajectories with an action whose ratio is below the bound, shape [B, T]."""
    return ~(log_ratio_BT >= math.log(bound)).all(-1, keepdim=True) * mask_BT


def _bounds(rule: RejectionConfig) -> tuple[float, float]:
    """Bounds of the rule's estimate."""
    if rule.estimator != "k1":
        return -math.inf, rule.high
    low = 1 / rule.high if rule.low is None else rule.low
    return math.log(low) if low > 0 else -math.inf, math.log(rule.high)


LIMITS_AT_ONCE: Final = 1024
"""Limits per collective; four collectives find the limit among all floats."""


def outliers(log_ratio_BT: Tensor, mask_BT: Tensor, bound: float, total: Callable[[Tensor], Tensor]) -> Tensor:
    """1.0 at the fewest actions without which the mean of (log π_prox/μ)² is at most the bound, shape [B, T].

    The mean is over the mask on all ranks. Actions of equal squares are kept or rejected together, so that the
    result depends neither on the order of the actions nor on the number of ranks. A NaN log ratio is rejected.

    Differences from the authors' code: the square is of π_prox/μ, not π_θ/μ, and the mean is over all actions, not only
    over those that the gradient would move farther away (advantage above 0 and ratio above 1, or both below). So no
    advantages are needed, and fewer actions may be rejected.

    Args:
        total: sums a tensor over all ranks.
    Source: M2PO, arXiv 2510.01161.
    """
    squares_BT = bounded(log_ratio_BT).square().float()
    limit = _limit(squares_BT[(mask_BT > 0) & ~squares_BT.isnan()], bound, total)
    return ~(squares_BT <= limit) * mask_BT


def _limit(squares_N: Tensor, bound: float, total: Callable[[Tensor], Tensor]) -> float:
    """The largest limit such that the squares up to it have a mean of at most the bound.

    That mean never falls as the limit rises, so bisection finds it; non-negative floats are ordered like their bits.
    """
    sorted_N, _ = squares_N.sort()
    sums = torch.cat([sorted_N.new_zeros(1, dtype=torch.float64), sorted_N.double().cumsum(0)])
    low, high = 0, _bits(LOG_BOUND**2) + 1
    while high - low > 1:
        tried = range(low, high, max(1, (high - low) // LIMITS_AT_ONCE))
        limits_K = torch.tensor(tried, dtype=torch.int32, device=squares_N.device).view(torch.float32)
        counts_K = torch.searchsorted(sorted_N, limits_K, right=True)
        sum_K, count_K = total(torch.stack([sums[counts_K], counts_K.double()]))
        fitting = int((sum_K <= bound * count_K).sum())
        low, high = tried[fitting - 1], tried[fitting] if fitting < len(tried) else high
    return torch.tensor(low, dtype=torch.int32).view(torch.float32).item()


def _bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))
