"""Losses of the policy that bound or weight ratios of actions or of whole trajectories, and the loss of the critic.

A sequence-level ratio is that of one trajectory; the trajectories of one episode have ratios of their own.

# B rows (trajectories) of one micro-batch, T actions of the longest
"""

from typing import Final

import torch
from torch import Tensor

from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms, bounded, bounded_exp

_LEAST_NLL: Final = 1e-3
"""Least mean negative log-prob that a trajectory's loss is divided by: that of a certain one is 0."""


def clipped_surrogate(
    ratio_BT: Tensor, advantages_BT: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-min(r·A, clip(r)·A) with clip(r) in [1 - clip_low, 1 + clip_high], and where the clip stops the gradient."""
    loss_BT = -ratio_BT * advantages_BT
    clipped_loss_BT = -ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT
    return torch.maximum(loss_BT, clipped_loss_BT), clipped_loss_BT > loss_BT


def ppo(inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None) -> LossTerms:
    """-min(r·A, clip(r)·A) with r = π_θ/π_prox; where A < 0 at most dual_clip·|A|.

    Multiplied by the importance weight π_prox/μ it is the decoupled objective.

    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 7; the bound where A < 0: Ye et al. 2019, arXiv 1912.09729;
    decoupled: Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298.
    """
    advantages_BT = inputs.advantages_BT
    loss_BT, stopped_BT = clipped_surrogate(inputs.ratio_BT, advantages_BT, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is not None:
        bound_BT = dual_clip * advantages_BT.abs()
        beyond_BT = loss_BT > bound_BT  # only where A < 0: else the loss is negative
        loss_BT = torch.where(beyond_BT, bound_BT, loss_BT)
        stopped_BT = stopped_BT | beyond_BT
    return LossTerms(loss_BT, inputs.marks(stopped_BT))


def sapo(inputs: LossInputs, *, tau_positive: float, tau_negative: float) -> LossTerms:
    """-A·(4/τ)·sigmoid(τ·(r - 1)), with r = π_θ/π_prox; τ is tau_positive where A > 0, else tau_negative.

    At r = 1 it has PPO's gradient; far from 1 the gradient vanishes.

    Source: arXiv 2511.20347.
    """
    tau_BT = torch.full_like(inputs.mask_BT, tau_negative).masked_fill(inputs.advantages_BT > 0, tau_positive)
    gate_BT = torch.sigmoid(tau_BT * (inputs.ratio_BT - 1)) * 4 / tau_BT
    return LossTerms(-gate_BT * inputs.advantages_BT, torch.zeros_like(inputs.mask_BT))


def dro(inputs: LossInputs, *, beta: float) -> LossTerms:
    """-A·log π_θ + β/2·log²(π_θ/π_prox), action by action.

    Source: Richemond et al. 2024, arXiv 2405.19107, with the advantage in place of reward less value.
    """
    loss_BT = -inputs.advantages_BT * inputs.logprobs_BT + beta / 2 * inputs.log_ratio_BT.square()
    return LossTerms(loss_BT, torch.zeros_like(inputs.mask_BT))


def kimi(inputs: LossInputs, *, tau: float) -> LossTerms:
    """-A·log π_θ(trajectory) + τ/2·log²(π_θ(trajectory)/π_prox(trajectory)).

    Each action has its own part of the first term and an equal share of the second, so that the sum over a trajectory's
    actions is its loss, with its gradient: aggregate by seq-mean-token-sum.

    Source: Kimi k1.5, arXiv 2501.12599, section 2.3.
    """
    penalty_B1 = tau / 2 * inputs.log_ratio_BT.sum(-1, keepdim=True).square()
    loss_BT = -inputs.advantages_BT * inputs.logprobs_BT + penalty_B1 / inputs.lengths_B1
    return LossTerms(loss_BT, torch.zeros_like(inputs.mask_BT))


def sppo(inputs: LossInputs, *, eta: float) -> LossTerms:
    """(log π_θ(trajectory)/π_prox(trajectory) - eta·A)², with A the trajectory's mean advantage.

    With A = P̂(y ≻ π_t) - ½ (`win_rate`) and π_prox = π_t that is SPPO's regression. Each action has an equal share, so
    that the sum over a trajectory's actions is its loss: aggregate by seq-mean-token-sum.

    Source: Wu et al. 2024 (SPPO), arXiv 2405.00675, section 4; the authors' code, loss type `sppo`.
    """
    advantage_B1 = (inputs.advantages_BT * inputs.mask_BT).sum(-1, keepdim=True) / inputs.lengths_B1
    error_B1 = inputs.log_ratio_BT.sum(-1, keepdim=True) - eta * advantage_B1
    loss_BT = (error_B1.square() / inputs.lengths_B1).expand_as(inputs.mask_BT)
    return LossTerms(loss_BT, torch.zeros_like(inputs.mask_BT))


def reinforce(inputs: LossInputs) -> LossTerms:
    """-A·log π_θ.

    Source: Williams 1992, Simple statistical gradient-following algorithms for connectionist reinforcement learning.
    """
    return LossTerms(-inputs.advantages_BT * inputs.logprobs_BT, torch.zeros_like(inputs.mask_BT))


def cispo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossTerms:
    """-sg[clip(r)]·A·log π_θ, with r = π_θ/π_prox and clip(r) in [1 - clip_low, 1 + clip_high].

    Source: MiniMax-M1, arXiv 2506.13585.
    """
    ratio_BT = inputs.ratio_BT.detach()
    weight_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT = -weight_BT * inputs.advantages_BT * inputs.logprobs_BT
    return LossTerms(loss_BT, inputs.marks(weight_BT != ratio_BT))


def topr(inputs: LossInputs, *, cap: float) -> LossTerms:
    """-w·A·log π_θ, where w is min(π_θ/μ of the trajectory, cap), detached, if A < 0, else 1.

    The trajectory's ratio is the product over its actions. It is an importance weight: with another one the correction
    would apply twice.

    Source: Le Roux et al. 2025, arXiv 2503.14286.
    """
    ratio_B1 = _trajectory_log_ratio(inputs).exp()
    negative_BT = inputs.advantages_BT < 0
    weight_BT = torch.where(negative_BT, ratio_B1.clamp(max=cap), 1.0)
    loss_BT = -weight_BT * inputs.advantages_BT * inputs.logprobs_BT
    return LossTerms(loss_BT, inputs.marks(negative_BT & (ratio_B1 > cap)))


def vespo(inputs: LossInputs, *, positive: tuple[float, float], negative: tuple[float, float]) -> LossTerms:
    """-φ(W)·A·log π_θ, with φ(W) = W^k·e^(λ(1 - W)), detached, and W = π_θ/μ of the trajectory, a product.

    φ(1) = 1; it falls to 0 on both sides of its maximum at W = k/λ. It contains the importance weight.

    Args:
        positive: k and λ where A ≥ 0.
        negative: k and λ where A < 0.

    Source: Shen et al. 2026 (VESPO), arXiv 2602.10693.
    """
    log_ratio_B1 = _trajectory_log_ratio(inputs)
    good_B1, bad_B1 = (torch.exp(k * log_ratio_B1 + lam * (1 - log_ratio_B1.exp())) for k, lam in (positive, negative))
    weight_BT = torch.where(inputs.advantages_BT >= 0, good_B1, bad_B1)
    return LossTerms(-weight_BT * inputs.advantages_BT * inputs.logprobs_BT, torch.zeros_like(inputs.mask_BT))


def _trajectory_log_ratio(inputs: LossInputs) -> Tensor:
    """log(π_θ/μ) of each whole trajectory, bounded and detached, shape [B, 1]."""
    log_ratio_BT = (inputs.logprobs_BT.detach() - inputs.behaviour_logprobs_BT) * inputs.mask_BT
    return bounded(log_ratio_BT.sum(-1, keepdim=True))


def asympo(inputs: LossInputs) -> LossTerms:
    """-A·log π_θ / sg[mean of -log π_θ over the trajectory].

    So each trajectory's mean loss is its advantage, and those of a group add up to 0, however unlikely stale answers
    have become. Log-probs of μ are not used. Aggregate by seq-mean-token-mean.

    Source: Liu et al. 2026 (ASymPO), arXiv 2606.03070.
    """
    logprobs_BT = inputs.logprobs_BT.detach() * inputs.mask_BT
    scale_B1 = (-logprobs_BT.sum(-1, keepdim=True) / inputs.lengths_B1).clamp(min=_LEAST_NLL)
    loss_BT = -inputs.advantages_BT * inputs.logprobs_BT / scale_B1
    return LossTerms(loss_BT, torch.zeros_like(inputs.mask_BT))


def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossTerms:
    """PPO's clipped surrogate of s = exp(mean log(π_θ/π_prox)), one ratio for all actions of a trajectory.

    The ratio of an action is sg[s]·π_θ/sg[π_θ], so that its gradient has its own advantage. Where a trajectory's
    actions have the same advantage, the mean token loss and its gradient are those of the sequence-level objective.

    Source: Zheng et al. 2025, arXiv 2507.18071 (the token-level form, GSPO-token).
    """
    mean_log_ratio_B1 = inputs.log_ratio_BT.detach().sum(-1, keepdim=True) / inputs.lengths_B1
    own_BT = torch.exp(inputs.logprobs_BT - inputs.logprobs_BT.detach())
    loss_BT, stopped_BT = clipped_surrogate(
        bounded_exp(mean_log_ratio_B1) * own_BT, inputs.advantages_BT, clip_low=clip_low, clip_high=clip_high
    )
    return LossTerms(loss_BT, inputs.marks(stopped_BT))


def gmpo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossTerms:
    """-A·exp(mean of the clipped log ratios), with A the trajectory's mean advantage.

    A log ratio is clipped to at most clip_high where A > 0, else to at least -clip_low. Each action has the loss of its
    trajectory, so that the mean over the actions is that loss, with its gradient: aggregate by seq-mean-token-mean.
    Importance weights of single actions then enter by their mean.

    Source: Zhao et al. 2025, arXiv 2507.20673.
    """
    log_ratio_BT, positive_BT = inputs.log_ratio_BT, inputs.advantages_BT > 0
    clipped_BT = torch.where(positive_BT, log_ratio_BT.clamp(max=clip_high), log_ratio_BT.clamp(min=-clip_low))
    ratio_B1 = bounded_exp(clipped_BT.sum(-1, keepdim=True) / inputs.lengths_B1)
    advantage_B1 = (inputs.advantages_BT * inputs.mask_BT).sum(-1, keepdim=True) / inputs.lengths_B1
    loss_BT = (-advantage_B1 * ratio_B1).expand_as(inputs.mask_BT)
    return LossTerms(loss_BT, inputs.marks((clipped_BT != log_ratio_BT) & (inputs.advantages_BT != 0)))


def value_loss(values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, *, clip_range: float | None) -> LossTerms:
    """½·max((V - R)², (clip(V) - R)²), with clip(V) within clip_range of the value before the step's first update.

    Args:
        values_BT: V, with gradient.
        clip_range: None: no clip.

    Returns: terms; values outside the mask must not be used.
    """
    error_BT = (values_BT - returns_BT).square()
    if clip_range is None:
        return LossTerms(0.5 * error_BT, torch.zeros_like(error_BT))
    change_BT = values_BT - old_values_BT
    clipped_error_BT = (old_values_BT + change_BT.clamp(-clip_range, clip_range) - returns_BT).square()
    # Within the range the two errors differ by rounding.
    clipped_BT = (clipped_error_BT > error_BT) & (change_BT.abs() > clip_range)
    return LossTerms(0.5 * torch.maximum(error_BT, clipped_error_BT), clipped_BT.to(error_BT.dtype))
