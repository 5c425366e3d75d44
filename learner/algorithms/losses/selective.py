"""Losses that exclude or penalise single actions, selected by a divergence or by a covariance.

`dppo_*`, `ipo`, `kpop`: the trust region bounds a divergence at each action, estimated over two outcomes: the action,
and any other. `dppo_*` exclude only what the gradient would move farther out; `ipo` and `kpop` all that is outside.

`*_cov`: actions with a high covariance of log-prob and advantage lose their gradient or are penalised, because they
reduce the entropy most. The covariance is (A - mean A)·(log π_θ - mean log π_θ), with the means over the micro-batch's
actions, as in the reference implementation. So the selection depends on the split of an update into micro-batches; in
each of them at least one action is selected, if there is a candidate.

# B rows (trajectories) of one micro-batch, T actions of the longest, N candidates
"""

from typing import Final

import torch
from torch import Tensor

from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms
from slipstream.learner.algorithms.losses.clipped import clipped_surrogate

_LEAST_REST: Final = 1e-8
"""Least probability of any other token, so that its logarithm is finite."""


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
        divergence_BT = _binary_kl(inputs.proximal_logprobs_BT, inputs.logprobs_BT)
    return _masked(inputs, divergence_BT, clip_low=clip_low, clip_high=clip_high, cap=cap)


def ipo(inputs: LossInputs, *, epsilon: float, tau: float) -> LossTerms:
    """`_inside` the binary total variation |π_θ - π_prox| ≤ epsilon; prime-rl has μ for π_prox.

    Source: prime-rl, loss type `ipo`.
    """
    with torch.no_grad():
        divergence_BT = (inputs.logprobs_BT.exp() - inputs.proximal_logprobs_BT.exp()).abs()
    return _inside(inputs, divergence_BT, epsilon=epsilon, tau=tau)


def kpop(inputs: LossInputs, *, epsilon: float, tau: float) -> LossTerms:
    """`_inside` KL(π_θ‖π_prox) ≤ epsilon and KL(π_prox‖π_θ) ≤ epsilon, both binary, in nats.

    The bound is wide in ratios for rare tokens, narrow for nearly certain ones. The authors have μ for π_prox.

    Source: Guo et al. 2026 (KPop), ringtech.notion.site/kpop; with tau as in prime-rl, loss type `kpop`.
    """
    with torch.no_grad():
        target_BT, proximal_BT = inputs.logprobs_BT, inputs.proximal_logprobs_BT
        divergence_BT = torch.maximum(_binary_kl(target_BT, proximal_BT), _binary_kl(proximal_BT, target_BT))
    return _inside(inputs, divergence_BT, epsilon=epsilon, tau=tau)


def _binary_kl(logprobs_BT: Tensor, other_logprobs_BT: Tensor) -> Tensor:
    """KL(p‖q) = p log(p/q) + (1 - p) log((1 - p)/(1 - q)) of log p and log q."""
    probability_BT = logprobs_BT.exp()
    rest_log_ratio_BT = _log_rest(logprobs_BT) - _log_rest(other_logprobs_BT)
    return probability_BT * (logprobs_BT - other_logprobs_BT) + (1 - probability_BT) * rest_log_ratio_BT


def _inside(inputs: LossInputs, divergence_BT: Tensor, *, epsilon: float, tau: float) -> LossTerms:
    """-r·A where the divergence is at most epsilon, whatever the sign of A, plus tau·log² r everywhere; r = π_θ/π_prox.

    The mean is over all actions, those outside the region included.
    """
    outside_BT = ~(divergence_BT <= epsilon)  # NaN is outside
    loss_BT = (-inputs.ratio_BT * inputs.advantages_BT).masked_fill(outside_BT, 0.0)
    if tau:
        loss_BT = loss_BT + tau * inputs.log_ratio_BT.square()
    return LossTerms(loss_BT, inputs.marks(outside_BT))


def _log_rest(logprobs_BT: Tensor) -> Tensor:
    """log(1 - p), of log p."""
    return (-torch.expm1(logprobs_BT)).clamp(min=_LEAST_REST).log()


def _masked(inputs: LossInputs, divergence_BT: Tensor, *, clip_low: float, clip_high: float, cap: float) -> LossTerms:
    """-min(r, cap)·A·log π_θ with r = π_θ/π_prox, detached; 0 where the gradient would leave the region.

    That is where A > 0, r > 1 and the divergence exceeds clip_high, or A < 0, r < 1 and it exceeds clip_low.
    """
    ratio_BT, advantages_BT = inputs.ratio_BT.detach(), inputs.advantages_BT
    too_likely_BT = (advantages_BT > 0) & (ratio_BT > 1) & (divergence_BT > clip_high)
    too_unlikely_BT = (advantages_BT < 0) & (ratio_BT < 1) & (divergence_BT > clip_low)
    outside_BT = too_likely_BT | too_unlikely_BT
    loss_BT = -ratio_BT.clamp(max=cap) * advantages_BT * inputs.logprobs_BT
    return LossTerms(loss_BT.masked_fill(outside_BT, 0.0), inputs.marks(outside_BT | (ratio_BT > cap)))


@torch.no_grad()
def top_entropy(entropy_BT: Tensor, mask_BT: Tensor, share: float) -> Tensor:
    """1.0 at the share of a micro-batch's actions with the highest entropies, ties included, shape [B, T].

    Source: Wang et al. 2025 (Beyond the 80/20 Rule), arXiv 2506.01939, which multiplies the losses by this; the
    mean stays over all actions.
    """
    count = _share(mask_BT, share)
    if not count:
        return torch.zeros_like(mask_BT)
    least = entropy_BT.masked_fill(mask_BT == 0, -torch.inf).flatten().topk(count).values[-1]
    return (entropy_BT >= least) * mask_BT


def clip_cov(
    inputs: LossInputs, *, clip_low: float, clip_high: float, ratio: float, cov_low: float, cov_high: float
) -> LossTerms:
    """PPO's clipped surrogate, with the loss of a few actions set to 0.

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
    rows, columns = candidates_N2[order_N[: _share(inputs.mask_BT, ratio)]].unbind(1)
    chosen_BT = torch.zeros_like(stopped_BT)
    chosen_BT[rows, columns] = True
    return LossTerms(loss_BT.masked_fill(chosen_BT, 0.0), inputs.marks(stopped_BT | chosen_BT))


def kl_cov(inputs: LossInputs, *, ratio: float, coefficient: float) -> LossTerms:
    """-r·A with r = π_θ/π_prox, plus coefficient·|log r| at the share `ratio` of all actions with the top covariances.

    Source: Cui et al. 2025, arXiv 2505.22617.
    """
    covariance_BT = _covariance(inputs).masked_fill(inputs.mask_BT == 0, -torch.inf)
    top = covariance_BT.flatten().topk(_share(inputs.mask_BT, ratio)).indices
    penalised_BT = torch.zeros_like(covariance_BT).flatten().index_fill(0, top, coefficient).view_as(covariance_BT)
    loss_BT = -inputs.ratio_BT * inputs.advantages_BT + penalised_BT * inputs.log_ratio_BT.abs()
    return LossTerms(loss_BT, torch.zeros_like(inputs.mask_BT))


def _covariance(inputs: LossInputs) -> Tensor:
    actions = inputs.mask_BT.sum().clamp(min=1)
    logprobs_BT, advantages_BT = inputs.logprobs_BT.detach(), inputs.advantages_BT
    mean_logprob = (logprobs_BT * inputs.mask_BT).sum() / actions
    mean_advantage = (advantages_BT * inputs.mask_BT).sum() / actions
    return (advantages_BT - mean_advantage) * (logprobs_BT - mean_logprob)


def _share(mask_BT: Tensor, ratio: float) -> int:
    """Number of actions in that share, rounded down, but at least one if there is any."""
    actions = int(mask_BT.sum())
    return min(actions, max(1, int(ratio * actions)))
