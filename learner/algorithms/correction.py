"""The off-policy correction: importance weights, rejected actions, and the interpolated proximal policy.

Sequence-level weights and rules apply to each trajectory; those of one episode may differ.

# B rows (trajectories), T actions of the longest; log ratios are 0 outside the mask
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from slipstream.configs.schema.learner import CorrectionConfig, RejectionConfig
from slipstream.learner.algorithms.advantages.base import one_rank
from slipstream.learner.algorithms.divergence import k2, k3
from slipstream.learner.algorithms.losses.base import LOG_BOUND, bounded


@dataclass(frozen=True)
class Correction:
    """Importance weights and rejections; tensors of shape [B, T], without gradient."""

    importance_weights_BT: Tensor
    """Factors of the loss: π_prox/μ after cap, band and normalisation; 0 outside `mask_BT`."""
    truncated_BT: Tensor
    """1.0 where the cap or the band changed the weight."""
    mask_BT: Tensor
    """1.0 where an action stays in the loss and its mean; it may be 0 everywhere."""
    masked: dict[str, Tensor]
    """For each reason (`<level>_<estimator>` of a rule, `veto`, `second_moment`), 1.0 where it rejects an action. Rules
    and veto may reject the same action; `second_moment` applies to the actions that they leave."""


@torch.no_grad()
def correct(
    log_ratio_BT: Tensor,
    mask_BT: Tensor,
    config: CorrectionConfig,
    total: Callable[[Tensor], Tensor] = one_rank,
    advantages_BT: Tensor | None = None,
) -> Correction:
    """Importance weights of the actions from their log π_prox/μ, and the actions that are rejected.

    Args:
        mask_BT: 1.0 where there is an action; a row may have none. Rows are whole trajectories.
        total: sums a tensor over all ranks; a collective. It is called only for `normalise` and `second_moment`, which
            are over all rows of the step.
        advantages_BT: for rejections of bad actions alone.
    """
    log_ratio_BT = torch.where(mask_BT > 0, log_ratio_BT, 0.0)
    importance_weights_BT, truncated_BT = importance_weights(log_ratio_BT, mask_BT, config)
    masked = {rule.name: rejected(log_ratio_BT, mask_BT, rule, advantages_BT) for rule in config.rejections}
    if config.veto is not None:
        masked["veto"] = vetoed(log_ratio_BT, mask_BT, config.veto)
    kept_BT = mask_BT
    for out_BT in masked.values():
        kept_BT = kept_BT * (1 - out_BT)
    if config.second_moment is not None:
        masked["second_moment"] = outliers(log_ratio_BT, kept_BT, config.second_moment, total)
        kept_BT = kept_BT * (1 - masked["second_moment"])
    # Not a product: the weight of a rejected action may be NaN.
    importance_weights_BT = torch.where(kept_BT > 0, importance_weights_BT, 0.0)
    if config.normalise:
        importance_weights_BT = normalised(importance_weights_BT, kept_BT, config, total)
    return Correction(importance_weights_BT, truncated_BT, kept_BT, masked)


def merged(corrections: Sequence[Correction], others_BT: Tensor) -> Correction:
    """The corrections of different rows as one.

    Args:
        others_BT: 1.0 at the actions of none of them, which keep weight 1.
    """
    masked: dict[str, Tensor] = {}
    for correction in corrections:
        masked |= {reason: masked.get(reason, 0) + out_BT for reason, out_BT in correction.masked.items()}
    weights, truncated, masks = zip(
        *((each.importance_weights_BT, each.truncated_BT, each.mask_BT) for each in corrections), strict=True
    )
    return Correction(sum(weights, others_BT), sum(truncated, 0 * others_BT), sum(masks, others_BT), masked)


def importance_weights(log_ratio_BT: Tensor, mask_BT: Tensor, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """The weights before normalisation, and 1.0 where cap or band changed them; both [B, T], 0 outside the mask.

    A weight is π_prox/μ of the action (`weight: token`), of its whole trajectory (`sequence`; an episode may have
    several), or 1 (`none`).

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
    """The weights divided by their mean over the actions in the mask; over the trajectories for `weight: sequence`.

    Args:
        weights_BT: 0 outside the mask.
        total: sums a tensor over all ranks.
    """
    if config.weight == "sequence":
        sums = torch.stack([weights_BT.amax(-1).sum(), mask_BT.amax(-1).sum()])
    else:
        sums = torch.stack([weights_BT.sum(), mask_BT.sum()])
    weight, count = total(sums.double())
    # The weights may all be 0.
    return weights_BT * torch.where(weight > 0, count / weight, 1.0).to(weights_BT.dtype)


def lag_in_steps(
    versions_BT: Tensor, *, consuming_version: int, steps_per_version: int, unpublished_steps: int
) -> Tensor:
    """Training steps between the weights that generated each action and those before the step's first update.

    Exact unless the learner was restarted between the two: versions are equally many steps apart but there. 0 for
    actions of unknown version (-1).

    Args:
        steps_per_version: `weights.publish_every_steps`.
        unpublished_steps: steps since the consuming version was published.
    """
    versions_behind_BT = (consuming_version - versions_BT).clamp(min=0)
    return (steps_per_version * versions_behind_BT + unpublished_steps) * (versions_BT >= 0)


def interpolate(logprobs_BT: Tensor, behaviour_logprobs_BT: Tensor, lag_BT: Tensor) -> Tensor:
    """log π_prox interpolated between log μ and log π_θ by the training steps between them, shape [B, T].

    log π_prox = log μ + a (log π_θ - log μ), a = lag / (lag + 1): μ is `lag` steps older than π_prox, and π_θ one step
    newer. So a is 0 where μ is π_prox, and nears 1 with the age of the action. No forward pass is needed.

    Args:
        logprobs_BT: log π_θ, detached.
        lag_BT: see `lag_in_steps`.
    Source: AReaL's documentation, "Proximal Log-Probability Approximation" (`prox_logp_method: loglinear`), whose
    versions are training steps.
    """
    return behaviour_logprobs_BT + lag_BT / (lag_BT + 1) * (logprobs_BT - behaviour_logprobs_BT)


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": bounded, "k2": k2, "k3": k3}


def rejected(
    log_ratio_BT: Tensor, mask_BT: Tensor, rule: RejectionConfig, advantages_BT: Tensor | None = None
) -> Tensor:
    """1.0 at the actions that a rule rejects, shape [B, T]; a NaN estimate is out of bounds.

    The bounds of `k1` are of the ratio. The log ratio is compared with their logs, so a mean is the geometric mean of
    the ratios.

    Source: `only_bad`: the off-policy sequence mask of DeepSeek-V3.2, arXiv 2512.02556, which is `sequence_mean` of
    `k1` with low = e^-δ. There π_θ stands for π_prox, and rejected actions keep their KL penalty and their place in
    the mean.
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
    if rule.only_bad:
        assert advantages_BT is not None, "a rule for bad actions needs advantages"
        out_BT = out_BT & (advantages_BT < 0)
    return out_BT * mask_BT


def vetoed(log_ratio_BT: Tensor, mask_BT: Tensor, bound: float) -> Tensor:
    """1.0 at all actions of the trajectories with an action whose ratio is below the bound, shape [B, T]."""
    return ~(log_ratio_BT >= math.log(bound)).all(-1, keepdim=True) * mask_BT


def _bounds(rule: RejectionConfig) -> tuple[float, float]:
    """Bounds of the rule's estimate."""
    high = math.inf if rule.high is None else rule.high
    if rule.estimator != "k1":
        return -math.inf, high
    low = 1 / high if rule.low is None else rule.low
    return math.log(low) if low > 0 else -math.inf, math.log(high)


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
