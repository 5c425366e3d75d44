"""The ratio π/μ of two policies in log space, mostly π_prox/μ, and what it says of their divergence.

# Any shape; log ratios are 0 outside the mask.
"""

from typing import Final

from torch import Tensor

LOG_BOUND: Final = 20.0
"""Log ratios beyond this are cut down to it: exp(20) is 5e8; more says nothing, and overflows in the end.
There a ratio is constant and has no gradient."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Log ratios whose exp and its square are finite."""
    return log_ratio.clamp(-LOG_BOUND, LOG_BOUND)


def k2(log_ratio: Tensor) -> Tensor:
    """½ log², an estimate of KL(μ‖π) in nats. Source: J. Schulman, "Approximating KL Divergence" (2020)."""
    return 0.5 * bounded(log_ratio).square()


def k3(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r, an unbiased estimate of KL(μ‖π) in nats, never negative. Source: as `k2`."""
    return bounded(log_ratio).expm1() - bounded(log_ratio)
