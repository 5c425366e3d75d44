"""The proximal policy without a forward pass.

# B rows (answers), T actions of the longest
"""

from torch import Tensor


def interpolate(
    logprobs_BT: Tensor, behaviour_logprobs_BT: Tensor, versions_BT: Tensor, *, consuming_version: int
) -> Tensor:
    """log π_prox between log μ and log π_θ, shape [B, T], by how far apart their versions are.

    log π_prox = log μ + a (log π_θ - log μ), a = (v_prox - v) / (v_θ - v), where v_prox is the consuming version, v_θ
    the next one, and v the version that generated the action. So a is 0 for actions of the consuming version, whose μ
    is π_prox, and nears 1 with their age. Actions of unknown version (-1) keep μ.

    Args:
        logprobs_BT: log π_θ, detached.
    Source: AReaL's documentation, "Proximal Log-Probability Approximation" (`prox_logp_method: loglinear`).
    """
    lag_BT = (consuming_version - versions_BT).clamp(min=0) * (versions_BT >= 0)
    share_BT = lag_BT / (lag_BT + 1)
    return behaviour_logprobs_BT + share_BT * (logprobs_BT - behaviour_logprobs_BT)
