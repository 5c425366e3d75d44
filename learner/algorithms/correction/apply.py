"""The off-policy correction: importance weights, rejected actions, and the interpolated proximal policy.

# B rows (trajectories), T actions of the longest; log ratios are 0 outside the mask
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.configs.schema.learner import CorrectionConfig
from slipstream.learner.algorithms.advantages.base import one_rank
from slipstream.learner.algorithms.correction.mismatch import bounded
from slipstream.learner.algorithms.correction.rejection import outliers, rejected, vetoed


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
    log_ratio_BT: Tensor, mask_BT: Tensor, config: CorrectionConfig, total: Callable[[Tensor], Tensor] = one_rank
) -> Correction:
    """Importance weights of the actions from their log π_prox/μ, and the actions that are rejected.

    Args:
        mask_BT: 1.0 where there is an action; a row may have none. Rows are whole trajectories.
        total: sums a tensor over all ranks; a collective. It is called only for `normalise` and `second_moment`, which
            are over all rows of the step.
    """
    log_ratio_BT = torch.where(mask_BT > 0, log_ratio_BT, 0.0)
    importance_weights_BT, truncated_BT = importance_weights(log_ratio_BT, mask_BT, config)
    masked = {rule.name: rejected(log_ratio_BT, mask_BT, rule) for rule in config.rejections}
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
