"""Losses with a smooth gate in place of a clip.

# B rows (answers) of one micro-batch, T actions of the longest
"""

import torch

from slipstream.learner.losses.base import LossInputs, LossTerms


def sapo(inputs: LossInputs, *, tau_positive: float, tau_negative: float) -> LossTerms:
    """-A·(4/τ)·sigmoid(τ·(r - 1)), with r = π_θ/π_prox and a steepness τ for good and another for other actions.

    At r = 1 it has PPO's gradient; far from 1 the gradient dies away.

    Source: arXiv 2511.20347.
    """
    tau_BT = torch.full_like(inputs.mask_BT, tau_negative).masked_fill(inputs.advantages_BT > 0, tau_positive)
    gate_BT = torch.sigmoid(tau_BT * (inputs.ratio_BT - 1)) * 4 / tau_BT
    return LossTerms(-gate_BT * inputs.advantages_BT, torch.zeros_like(inputs.mask_BT))
