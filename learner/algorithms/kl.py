"""The divergence from the reference policy: its estimate at each action, and the coefficient of its penalty.

# B rows (trajectories), T actions of the longest
"""

import math
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from slipstream.configs.schema.learner import KlConfig, KlEstimator
from slipstream.learner.algorithms.mismatch import k3

_MAX_ERROR: Final = 0.2


def kl_estimate(logprobs_BT: Tensor, reference_logprobs_BT: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimates of KL(π_θ‖π_ref) from the actions that were drawn, shape [B, T].

    With δ = log π_θ - log π_ref: k1 = δ, k2 = δ²/2, k3 = e^-δ - 1 + δ, abs = |δ|. With `+` the gradient is that of k2,
    on average the KL's; the gradient of k1 is 0 on average, and that of k3 is the reverse KL's.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    delta_BT = logprobs_BT - reference_logprobs_BT
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
