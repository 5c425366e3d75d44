"""Generalised advantage estimation, and the returns that its critic learns to predict.

# B rows (answers), T actions
"""

import torch
from torch import Tensor

from slipstream.learner.advantages.base import AdvantageInputs, given
from slipstream.learner.advantages.returns import discounted_sum
from slipstream.learner.advantages.whiten import whiten


def gae(inputs: AdvantageInputs, *, gamma: float, lam: float, length_adaptive: float | None) -> Tensor:
    """Discounted sums of the critic's surprises, whitened over the actions of all ranks, shape [B, T].

    Args:
        gamma: discount per action.
        lam: λ, how far a surprise is carried back.
        length_adaptive: a of λ = 1 - 1 / (a · answer length), at least 0, in place of `lam`; None: off.

    Source: Schulman et al. 2015, arXiv 1506.02438, eq. 16; length-adaptive λ: Yue et al. 2025 (VAPO), arXiv 2504.05118.
    """
    lam_B1: float | Tensor = lam
    if length_adaptive is not None:
        lam_B1 = (1 - 1 / (length_adaptive * inputs.mask_BT.sum(-1, keepdim=True))).clamp(min=0)
    return whiten(_raw_gae(inputs, gamma, lam_B1), inputs.mask_BT, inputs.total)


@torch.no_grad()
def value_returns(inputs: AdvantageInputs, *, gamma: float, lam: float) -> Tensor:
    """What the critic should have said: advantages at its own λ, not whitened, plus its values, shape [B, T].

    0 outside the mask, without gradient. λ = 1 gives the reward to go, whatever the values.

    Source: Yue et al. 2025 (VAPO, decoupled GAE), arXiv 2504.05118.
    """
    return _raw_gae(inputs, gamma, lam) + given(inputs.values_BT, "values_BT") * inputs.mask_BT


def _raw_gae(inputs: AdvantageInputs, gamma: float, lam: float | Tensor) -> Tensor:
    values_BT = given(inputs.values_BT, "values_BT") * inputs.mask_BT
    next_values_BT = torch.nn.functional.pad(values_BT[:, 1:], (0, 1))
    surprise_BT = inputs.rewards_BT * inputs.mask_BT + gamma * next_values_BT - values_BT
    return discounted_sum(surprise_BT, gamma * lam) * inputs.mask_BT
