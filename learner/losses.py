"""The decoupled PPO objective: one policy bounds the step, another pays for the staleness.

# A actions
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.configs.schema.learner import LossConfig


@dataclass(frozen=True)
class LossTerms:
    """Per action, shape [A]; all but `loss_A` detached."""

    loss_A: Tensor
    behaviour_weight_A: Tensor
    """π_prox/μ before truncation."""
    clipped_A: Tensor
    """1 where the ratio's clip stopped the gradient."""
    truncated_A: Tensor
    """1 where the behaviour weight was capped."""


def decoupled_ppo(
    target_logprobs_A: Tensor,
    proximal_logprobs_A: Tensor,
    behaviour_logprobs_A: Tensor,
    advantages_A: Tensor,
    config: LossConfig,
) -> LossTerms:
    """-min(w, cap) · min(r·A, clip(r)·A), with r = π_θ/π_prox and w = π_prox/μ, per action.

    Args:
        target_logprobs_A: log π_θ, with gradient.
        proximal_logprobs_A: log π_prox, the anchor of the trust region.
        behaviour_logprobs_A: log μ, as the engine recorded it.
        advantages_A: advantage of each action.

    Source: Hilton et al. 2021, arXiv 2110.00641, eq. 2; AReaL, arXiv 2505.24298, eq. 5; the cap: Espeholt et al. 2018.
    """
    ratio_A = torch.exp(target_logprobs_A - proximal_logprobs_A)
    clipped_ratio_A = ratio_A.clamp(1 - config.clip_low, 1 + config.clip_high)
    gain_A = ratio_A * advantages_A
    clipped_gain_A = clipped_ratio_A * advantages_A
    weight_A = torch.exp(proximal_logprobs_A - behaviour_logprobs_A).detach()
    return LossTerms(
        loss_A=-weight_A.clamp(max=config.behaviour_weight_cap) * torch.minimum(gain_A, clipped_gain_A),
        behaviour_weight_A=weight_A,
        clipped_A=(clipped_gain_A < gain_A).detach().float(),
        truncated_A=(weight_A > config.behaviour_weight_cap).float(),
    )
