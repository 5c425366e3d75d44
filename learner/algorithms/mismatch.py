"""Metrics of the off-policy mismatch π/μ, computed from sums over micro-batches and ranks.

# B rows (trajectories), T actions of the longest
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.learner.algorithms.losses.base import bounded


def k2(log_ratio: Tensor) -> Tensor:
    """½ log², an estimate of KL(μ‖π) in nats. Source: J. Schulman, "Approximating KL Divergence" (2020)."""
    return 0.5 * bounded(log_ratio).square()


def k3(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r, an unbiased estimate of KL(μ‖π) in nats, never negative. Source: as `k2`."""
    return bounded(log_ratio).expm1() - bounded(log_ratio)


SUMS = (
    "actions", "answers", "weight", "weight_squared", "k1", "k3", "ratio_squared", "product_squared",
)  # fmt: skip
"""Sums that the metrics are computed from."""


def mismatch_sums(log_ratio_BT: Tensor, weights_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
    """The `SUMS`, in float64, to be added up over micro-batches and ranks.

    Args:
        log_ratio_BT: log π/μ, where π is the proximal or the target policy.
        weights_BT: weights of the actions, such as the ratios; 0 outside the mask.
    """
    log_ratio_BT = torch.where(mask_BT > 0, bounded(log_ratio_BT), 0.0)
    answers_B = mask_BT.amax(-1)
    parts = (
        mask_BT,
        answers_B,
        weights_BT,
        weights_BT.square(),
        -log_ratio_BT,
        k3(log_ratio_BT),
        (2 * log_ratio_BT).exp() * mask_BT,
        (2 * bounded(log_ratio_BT.sum(-1))).exp() * answers_B,
    )
    return {name: part.double().sum() for name, part in zip(SUMS, parts, strict=True)}


def mismatch_metrics(sums: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Metrics from sums over at least one action.

    `weight_mean`; `ess`, the effective sample size (Σw)² / (n Σw²) as a share of the actions, 0 where all weights are;
    `kl_k1` and `kl_k3`, estimates of KL(μ‖π) per action in nats; `chi2_token` and `chi2_sequence`, χ²(π‖μ) = E[r²] - 1
    of the actions' ratios and of the trajectories' (their products).
    """
    actions, answers, weight, weight_squared, k1_sum, k3_sum, ratio_squared, product_squared = (
        float(sums[name]) for name in SUMS
    )
    return {
        "weight_mean": weight / actions,
        "ess": weight**2 / (actions * weight_squared) if weight_squared else 0.0,
        "kl_k1": k1_sum / actions,
        "kl_k3": k3_sum / actions,
        "chi2_token": ratio_squared / actions - 1,
        "chi2_sequence": product_squared / answers - 1,
    }
