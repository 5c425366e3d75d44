"""Losses whose trust region bounds a divergence at each action, estimated as if there were two tokens: it, and not it.

# B rows (answers) of one micro-batch, T actions of the longest
"""

from typing import Final

import torch
from torch import Tensor

from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms

_LEAST_REST: Final = 1e-8
"""Least probability of `not it`, so that its logarithm is finite."""


def dppo_tv(inputs: LossInputs, *, clip_low: float, clip_high: float, cap: float) -> LossTerms:
    """`_masked` by the binary total variation |π_θ - π_prox|.

    Source: Qi et al. 2026, arXiv 2602.04879.
    """
    with torch.no_grad():
        divergence_BT = (inputs.logprobs_BT.exp() - inputs.proximal_logprobs_BT.exp()).abs()
    return _masked(inputs, divergence_BT, clip_low=clip_low, clip_high=clip_high, cap=cap)


def dppo_kl(inputs: LossInputs, *, clip_low: float, clip_high: float, cap: float) -> LossTerms:
    """`_masked` by the binary KL(π_prox‖π_θ), in nats.

    Source: Qi et al. 2026, arXiv 2602.04879.
    """
    with torch.no_grad():
        proximal_BT = inputs.proximal_logprobs_BT.exp()
        rest_log_ratio_BT = _log_rest(inputs.proximal_logprobs_BT) - _log_rest(inputs.logprobs_BT)
        divergence_BT = -proximal_BT * inputs.log_ratio_BT + (1 - proximal_BT) * rest_log_ratio_BT
    return _masked(inputs, divergence_BT, clip_low=clip_low, clip_high=clip_high, cap=cap)


def _log_rest(logprobs_BT: Tensor) -> Tensor:
    """log(1 - p), of log p."""
    return (-torch.expm1(logprobs_BT)).clamp(min=_LEAST_REST).log()


def _masked(inputs: LossInputs, divergence_BT: Tensor, *, clip_low: float, clip_high: float, cap: float) -> LossTerms:
    """-min(r, cap)·A·log π_θ with r = π_θ/π_prox, detached; 0 where the advantage pushes an action further out.

    That is a good action that got likelier by more than clip_high, and a bad one that got less likely by more than
    clip_low, in units of the divergence.
    """
    ratio_BT, advantages_BT = inputs.ratio_BT.detach(), inputs.advantages_BT
    too_likely_BT = (advantages_BT > 0) & (ratio_BT > 1) & (divergence_BT > clip_high)
    too_unlikely_BT = (advantages_BT < 0) & (ratio_BT < 1) & (divergence_BT > clip_low)
    outside_BT = too_likely_BT | too_unlikely_BT
    loss_BT = -ratio_BT.clamp(max=cap) * advantages_BT * inputs.logprobs_BT
    return LossTerms(loss_BT.masked_fill(outside_BT, 0.0), inputs.marks(outside_BT | (ratio_BT > cap)))
