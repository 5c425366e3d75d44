"""Losses of preferences: pairs of answers to one prompt, or single answers with a verdict.

# P pairs, R answers
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Answers:
    """Log-probs of whole answers under the policy and under a frozen reference."""

    logprobs_R: Tensor
    """Sum of log π_θ over an answer's tokens, with gradient."""
    reference_logprobs_R: Tensor
    """Sum of log π_ref; not used by a loss without a reference."""
    tokens_R: Tensor
    """Tokens of each answer, at least 1."""

    @property
    def log_ratios_R(self) -> Tensor:
        """log π_θ/π_ref of the answers."""
        return self.logprobs_R - self.reference_logprobs_R

    def pairs(self) -> tuple["Answers", "Answers"]:
        """The chosen and the rejected answers, if these take turns."""
        parts = [(self.logprobs_R[start::2], self.reference_logprobs_R[start::2]) for start in (0, 1)]
        chosen, rejected = (Answers(*part, self.tokens_R[start::2]) for start, part in enumerate(parts))
        return chosen, rejected


@dataclass(frozen=True)
class PreferenceTerms:
    """Loss and rewards: of a policy the implicit ones, for which it would be optimal, given its reference."""

    loss_P: Tensor
    """With gradient; of each pair, or of each answer with a verdict."""
    chosen_reward_P: Tensor
    """Detached, as the next; of an answer with a verdict either is its reward."""
    rejected_reward_P: Tensor


def dpo(chosen: Answers, rejected: Answers, *, beta: float, label_smoothing: float) -> PreferenceTerms:
    """-(1 - ε) log sigmoid(β Δ) - ε log sigmoid(-β Δ), where Δ is the difference of the log ratios of the pair.

    With ε, the share of verdicts that are wrong, it is cDPO.

    Source: arXiv 2305.18290, eq. 7; Mitchell 2023, https://ericmitchell.ai/cdpo.pdf, eq. 3.
    """
    margin_P = beta * (chosen.log_ratios_R - rejected.log_ratios_R)
    loss_P = -(1 - label_smoothing) * F.logsigmoid(margin_P) - label_smoothing * F.logsigmoid(-margin_P)
    return _terms(loss_P, beta * chosen.log_ratios_R, beta * rejected.log_ratios_R)


def ipo(chosen: Answers, rejected: Answers, *, beta: float) -> PreferenceTerms:
    """(Δ - 1/(2 β))², where Δ is the difference of the log ratios per token; β is the paper's τ.

    The paper's sums would let the square grow with length. Its authors confirmed the mean over tokens to TRL.

    Source: arXiv 2310.12036, eq. 17; TRL 1.16 `DPOTrainer`, `loss_type="ipo"`.
    """
    chosen_P, rejected_P = (answers.log_ratios_R / answers.tokens_R for answers in (chosen, rejected))
    return _terms((chosen_P - rejected_P - 1 / (2 * beta)).square(), beta * chosen_P, beta * rejected_P)


def simpo(chosen: Answers, rejected: Answers, *, beta: float, margin: float) -> PreferenceTerms:
    """-log sigmoid(β Δ - m), where Δ is the difference of the log-probs per token, and m the margin; no reference.

    Source: arXiv 2405.14734; TRL 1.16 `CPOTrainer`, `loss_type="simpo"`.
    """
    chosen_P, rejected_P = (beta * answers.logprobs_R / answers.tokens_R for answers in (chosen, rejected))
    return _terms(-F.logsigmoid(chosen_P - rejected_P - margin), chosen_P, rejected_P)


def kto(
    answers: Answers,
    desirable_R: Tensor,
    baseline: Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> PreferenceTerms:
    """λ_D (1 - sigmoid(β (h - z))) of desirable answers, λ_U (1 - sigmoid(β (z - h))) of others; h is the log ratio.

    Source: arXiv 2402.01306; TRL 1.16 `KTOTrainer`.

    Args:
        desirable_R: true for desirable answers.
        baseline: z, a number without gradient, see `kto_baseline`.
    """
    gain_R = beta * (answers.log_ratios_R - baseline)
    loss_R = torch.where(
        desirable_R, desirable_weight * torch.sigmoid(-gain_R), undesirable_weight * torch.sigmoid(gain_R)
    )
    reward_R = beta * answers.log_ratios_R
    return _terms(loss_R, reward_R, reward_R)


def kto_baseline(log_ratio_sum: Tensor, answers: Tensor) -> Tensor:
    """KTO's reference point: the mean log ratio of answers to other prompts than their own, at least 0; detached.

    It estimates KL(π_θ‖π_ref), biased but without sampling.

    Source: arXiv 2402.01306; TRL 1.16 `KTOTrainer`.

    Args:
        log_ratio_sum, answers: sum of the log ratios, and number of the answers, of an update on all ranks.
    """
    return (log_ratio_sum / answers.clamp(min=1)).clamp(min=0).detach()


def bradley_terry(chosen_reward_P: Tensor, rejected_reward_P: Tensor, margin_P: Tensor) -> PreferenceTerms:
    """-log sigmoid(r_chosen - r_rejected - m): the negative log-likelihood of the verdicts under the rewards.

    Source: Bradley and Terry 1952; arXiv 2203.02155; with a margin arXiv 2307.09288; TRL 1.16 `RewardTrainer`.
    """
    loss_P = -F.logsigmoid(chosen_reward_P - rejected_reward_P - margin_P)
    return _terms(loss_P, chosen_reward_P, rejected_reward_P)


def _terms(loss_P: Tensor, chosen_reward_P: Tensor, rejected_reward_P: Tensor) -> PreferenceTerms:
    return PreferenceTerms(loss_P, chosen_reward_P.detach(), rejected_reward_P.detach())
