"""Divergences of policies, estimated from the actions that were drawn: the penalty's KL, and the mismatch π/μ.

# B rows (trajectories), T actions of the longest
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from slipstream.configs.schema.learner import KlConfig, KlEstimator
from slipstream.learner.algorithms.losses.base import bounded, bounded_exp

_MAX_ERROR: Final = 0.2
"""Relative error of the KL beyond which the coefficient changes no faster."""


def k2(log_ratio: Tensor) -> Tensor:
    """½ log², an estimate of KL(μ‖π) in nats. Source: J. Schulman, "Approximating KL Divergence" (2020)."""
    return 0.5 * bounded(log_ratio).square()


def k3(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r, an unbiased estimate of KL(μ‖π) in nats, never negative. Source: as `k2`."""
    return bounded(log_ratio).expm1() - bounded(log_ratio)


def kl_estimate(
    logprobs_BT: Tensor,
    reference_logprobs_BT: Tensor,
    estimator: KlEstimator,
    behaviour_logprobs_BT: Tensor | None = None,
) -> Tensor:
    """Estimates of KL(π_θ‖π_ref) from the actions that were drawn, shape [B, T].

    With δ = log π_θ - log π_ref: k1 = δ, k2 = δ²/2, k3 = e^-δ - 1 + δ, abs = |δ|. With `+` the gradient is that of k2,
    on average the KL's; the gradient of k1 is 0 on average, and that of k3 is the reverse KL's. k3* = π_θ/μ · k3, ratio
    and gradient included: on average over actions drawn from μ it is the KL, with its gradient.

    Args:
        behaviour_logprobs_BT: log μ; only for k3*.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html; k3*: DeepSeek-V3.2, arXiv 2512.02556.
    """
    delta_BT = logprobs_BT - reference_logprobs_BT
    if estimator == "k3*":
        assert behaviour_logprobs_BT is not None, "k3* needs log μ"
        return bounded_exp(logprobs_BT - behaviour_logprobs_BT) * _estimate(delta_BT, "k3")
    value_BT = _estimate(delta_BT, estimator.removesuffix("+"))
    if not estimator.endswith("+"):
        return value_BT
    k2_BT = _estimate(delta_BT, "k2")
    return value_BT.detach() + k2_BT - k2_BT.detach()


def _estimate(delta_BT: Tensor, estimator: str) -> Tensor:
    match estimator:
        case "k1":
            return delta_BT
        case "k2":
            return delta_BT.square() / 2
        case "k3":
            # k3() bounds both of its terms: without the exponential the gradient would point the wrong way.
            return k3(-delta_BT)
        case "abs":
            return delta_BT.abs()
    raise AssertionError(f"unknown KL estimator {estimator!r}")


@dataclass
class KlCoefficient:
    """Coefficient of the penalty: fixed, or adapted by a proportional controller to a target of the KL per action.

    Source: Ziegler et al. 2019, arXiv 1909.08593, section 2.2, with a gain of episodes / horizon (at most 1).
    """

    config: KlConfig
    value: float = field(init=False)
    """Factor of the KL."""

    def __post_init__(self) -> None:
        self.value = self.config.coefficient

    def update(self, kl: float, episodes: int) -> None:
        """Adapts the coefficient to a step's KL per action over its episodes; NaN changes nothing.

        β ← β·(1 + gain·e), where e is the relative error KL/target - 1, clipped to ±0.2.
        """
        if self.config.target is None or math.isnan(kl):
            return
        error = min(max(kl / self.config.target - 1, -_MAX_ERROR), _MAX_ERROR)
        self.value *= 1 + min(episodes / self.config.horizon, 1.0) * error

    def restore(self, value: float) -> None:
        """Sets a checkpoint's value; a fixed coefficient stays that of the configuration."""
        if self.config.target is not None:
            self.value = value


SUMS: Final = (
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


def answer_weight_sums(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Number of a micro-batch's answers, and sums of their weights and squared weights, in float64, shape [3].

    An answer's weight is π/μ of the whole trajectory, without a cap.

    Args:
        log_ratio_BT: log π/μ of the actions.
    """
    answers_B = mask_BT.amax(-1).double()
    weight_B = bounded((log_ratio_BT * mask_BT).sum(-1)).double().exp() * answers_B
    return torch.stack([answers_B.sum(), weight_B.sum(), weight_B.square().sum()])


def learning_rate_factor(answer_sums: Tensor, reference: float) -> float:
    """√(ESS/reference), at most 1, with the effective sample size (Σw)² / (n Σw²) of an update's answers.

    Args:
        answer_sums: of `answer_weight_sums`, over all micro-batches and ranks.
        reference: effective sample size of fresh answers, as a share of them.
    Source: Huang et al. 2026 (VCPO), arXiv 2602.17616: the square root is for optimizers like AdamW.
    """
    answers, weight, weight_squared = answer_sums.tolist()
    if not answers:
        return 1.0
    return min(1.0, math.sqrt(weight**2 / (answers * weight_squared) / reference))
