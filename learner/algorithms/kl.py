"""The divergence from the reference policy: its estimate at each action, and the coefficient of its penalty.

# B rows (answers), T actions of the longest
"""

import math
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from slipstream.configs.schema.learner import KlConfig, KlEstimator
from slipstream.learner.algorithms.correction.mismatch import k3

_MOST_ERROR: Final = 0.2


def kl_estimate(logprobs_BT: Tensor, reference_logprobs_BT: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimates of KL(π_θ‖π_ref) from the actions that were drawn, shape [B, T]; of δ = log π_θ - log π_ref:

    k1 = δ, k2 = δ²/2, k3 = e^-δ - 1 + δ, abs = |δ|. With `+` the value is that and the gradient is k2's: of the three,
    only its gradient is the KL's on average; k1's is 0 on average and k3's is that of the reverse KL.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    delta_BT = logprobs_BT - reference_logprobs_BT
    value_BT = _base(delta_BT, estimator.removesuffix("+"))
    if not estimator.endswith("+"):
        return value_BT
    k2_BT = _base(delta_BT, "k2")
    return value_BT.detach() + k2_BT - k2_BT.detach()


def _base(delta_BT: Tensor, estimator: str) -> Tensor:
    match estimator:
        case "k1":
            return delta_BT
        case "k2":
            return delta_BT.square() / 2
        case "k3":
            # It bounds both of its terms: without its exponential the gradient would point the wrong way.
            return k3(-delta_BT)
        case "abs":
            return delta_BT.abs()
    raise AssertionError(f"the configuration knows no KL estimator {estimator!r}")


@dataclass
class Coefficient:
    """Weight of the penalty: fixed, or steered so that the KL per action comes to a target.

    That is a proportional controller in log space.

    Source: Ziegler et al. 2019, arXiv 1909.08593, section 2.2, with a gain of episodes / horizon (at most 1).
    """

    config: KlConfig
    value: float = field(init=False)
    """To multiply the KL with."""

    def __post_init__(self) -> None:
        self.value = self.config.coefficient

    def update(self, kl: float, episodes: int) -> None:
        """Adjusts the coefficient by a step's KL per action, measured on so many episodes; NaN changes nothing.

        β ← β·(1 + gain·e), with e the relative error KL/target - 1, clipped to ±0.2.
        """
        if self.config.target is None or math.isnan(kl):
            return
        error = min(max(kl / self.config.target - 1, -_MOST_ERROR), _MOST_ERROR)
        self.value *= 1 + min(episodes / self.config.horizon, 1.0) * error

    def restore(self, value: float) -> None:
        """Goes on from a checkpoint's value; a fixed one stays what the configuration now says."""
        if self.config.target is not None:
            self.value = value
