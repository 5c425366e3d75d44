"""Losses that hold back the actions whose log-prob and advantage covary most: those make the entropy collapse.

An action's covariance is (A - mean A)·(log π_θ - mean log π_θ), with the means over the micro-batch's actions, as in
the reference implementation. So what is chosen depends on how an update is split into micro-batches; and in each of
them at least one action is chosen, if there is a candidate.

# B rows (answers) of one micro-batch, T actions of the longest, N candidates
"""

import torch
from torch import Tensor

from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms
from slipstream.learner.algorithms.losses.clipped import clipped_surrogate


def clip_cov(
    inputs: LossInputs, *, clip_low: float, clip_high: float, ratio: float, cov_low: float, cov_high: float
) -> LossTerms:
    """PPO's clipped surrogate, without the loss of a few actions.

    They are drawn at random, the share `ratio` of all actions, from those that PPO does not clip and whose covariance
    is between cov_low and cov_high.

    Source: Cui et al. 2025, arXiv 2505.22617.
    """
    loss_BT, stopped_BT = clipped_surrogate(
        inputs.ratio_BT, inputs.advantages_BT, clip_low=clip_low, clip_high=clip_high
    )
    covariance_BT = _covariance(inputs)
    in_band_BT = (covariance_BT > cov_low) & (covariance_BT < cov_high)
    candidates_N2 = torch.nonzero(in_band_BT & ~stopped_BT & (inputs.mask_BT > 0))
    order_N = torch.randperm(len(candidates_N2), generator=inputs.generator).to(candidates_N2.device)
    rows, columns = candidates_N2[order_N[: _share(inputs, ratio)]].unbind(1)
    chosen_BT = torch.zeros_like(stopped_BT)
    chosen_BT[rows, columns] = True
    return LossTerms(loss_BT.masked_fill(chosen_BT, 0.0), inputs.marks(stopped_BT | chosen_BT))


def kl_cov(inputs: LossInputs, *, ratio: float, coefficient: float) -> LossTerms:
    """-r·A with r = π_θ/π_prox, plus coefficient·|log r| at the share `ratio` of all actions with the top covariances.

    Source: Cui et al. 2025, arXiv 2505.22617.
    """
    covariance_BT = _covariance(inputs).masked_fill(inputs.mask_BT == 0, -torch.inf)
    top = covariance_BT.flatten().topk(_share(inputs, ratio)).indices
    penalised_BT = torch.zeros_like(covariance_BT).flatten().index_fill(0, top, coefficient).view_as(covariance_BT)
    loss_BT = -inputs.ratio_BT * inputs.advantages_BT + penalised_BT * inputs.log_ratio_BT.abs()
    return LossTerms(loss_BT, torch.zeros_like(inputs.mask_BT))


def _covariance(inputs: LossInputs) -> Tensor:
    actions = inputs.mask_BT.sum().clamp(min=1)
    logprobs_BT, advantages_BT = inputs.logprobs_BT.detach(), inputs.advantages_BT
    mean_logprob = (logprobs_BT * inputs.mask_BT).sum() / actions
    mean_advantage = (advantages_BT * inputs.mask_BT).sum() / actions
    return (advantages_BT - mean_advantage) * (logprobs_BT - mean_logprob)


def _share(inputs: LossInputs, ratio: float) -> int:
    """That share of the actions, rounded down, but one at least if there is any."""
    actions = int(inputs.mask_BT.sum())
    return min(actions, max(1, int(ratio * actions)))
