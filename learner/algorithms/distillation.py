"""Divergences of the policy from a teacher at each action, and the advantage that is one's estimate.

Over the vocabulary they are computed from the hidden states of both models, some actions at a time: the logits of all
actions never exist together where they are larger than a bound, and are computed again for the backward pass.

# A actions, V vocabulary, K tokens that are compared, D hidden size of the policy, E of the teacher
"""

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slipstream.learner.models.fused_head import IMPOSSIBLE, LogitRule

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]

_LIVE_TENSORS: Final = 8
"""Tensors of the size of the logits, in fp32, that one chunk of actions needs, both models' together."""
_FEWEST_ROWS: Final = 16
"""Actions of a chunk: with fewer, reading the heads for each takes longer than the products."""


def divergence(teacher_AK: Tensor, policy_AK: Tensor, kind: Divergence, beta: float = 0.5) -> Tensor:
    """Divergence of two distributions of logarithms of probabilities, in nats, shape [A].

    With P the teacher and Q the policy: `forward_kl` is KL(P‖Q), `reverse_kl` KL(Q‖P), and `jsd`
    β KL(P‖M) + (1 - β) KL(Q‖M) with M = β P + (1 - β) Q; divided by β it is forward KL as β → 0, and by 1 - β reverse
    KL as β → 1.

    Args:
        teacher_AK: without gradient.

    Source: Agarwal et al. 2023 (GKD), arXiv 2306.13649, eq. 1.
    """
    if kind == "forward_kl":
        return _kl(teacher_AK, policy_AK)
    if kind == "reverse_kl":
        return _kl(policy_AK, teacher_AK)
    weights = torch.tensor([beta, 1 - beta], dtype=policy_AK.dtype, device=policy_AK.device).log()
    mixture_AK = torch.logaddexp(teacher_AK + weights[0], policy_AK + weights[1])
    return beta * _kl(teacher_AK, mixture_AK) + (1 - beta) * _kl(policy_AK, mixture_AK)


def _kl(first_AK: Tensor, second_AK: Tensor) -> Tensor:
    return (first_AK.exp() * (first_AK - second_AK)).sum(-1)


def distillation_advantage(teacher: Tensor, policy: Tensor) -> Tensor:
    """sg[log π_T - log π_θ] of the actions, any shape: its policy gradient is that of -KL(π_θ‖π_T).

    Source: Xiao et al. 2026 (MiMo-V2-Flash, MOPD), as in NeMo-RL `docs/about/algorithms/mopd.md`.
    """
    return (teacher - policy).detach()


@dataclass(frozen=True)
class Comparison:
    """The divergence, and the part of the distributions that it compares."""

    kind: Divergence
    beta: float = 0.5
    top_k: int | None = None
    """Likeliest tokens of the teacher; None: all."""
    tail: bool = True
    """All other tokens count as one more; else both distributions are renormalised without them."""

    def of_logits(self, teacher_AV: Tensor, policy_AV: Tensor) -> tuple[Tensor, Tensor]:
        """Divergence, with gradient, and 1.0 where both hold the same token likeliest, both shape [A].

        Args:
            teacher_AV, policy_AV: logits; of vocabularies of different sizes, padded ones, the common part counts.
        """
        common = min(teacher_AV.shape[-1], policy_AV.shape[-1])
        teacher_AV, policy_AV = teacher_AV[:, :common].log_softmax(-1), policy_AV[:, :common].log_softmax(-1)
        agreed_A = (teacher_AV.argmax(-1) == policy_AV.argmax(-1)).to(policy_AV.dtype)
        if self.top_k is not None and self.top_k < common:
            tokens_AK = teacher_AV.topk(self.top_k).indices
            teacher_AV, policy_AV = (self._of_tokens(logprobs_AV, tokens_AK) for logprobs_AV in (teacher_AV, policy_AV))
        return divergence(teacher_AV, policy_AV, self.kind, self.beta), agreed_A

    def of_top(self, top: "TopTokens", policy_AV: Tensor) -> tuple[Tensor, Tensor]:
        """As `of_logits`, from the teacher's likeliest tokens."""
        policy_AV = policy_AV.log_softmax(-1)
        agreed_A = (top.ids_AK[:, 0] == policy_AV.argmax(-1)).to(policy_AV.dtype)
        teacher_AK, policy_AK = top.logprobs_AK.to(policy_AV.dtype), self._of_tokens(policy_AV, top.ids_AK)
        if not self.tail:
            return divergence(teacher_AK.log_softmax(-1), policy_AK, self.kind, self.beta), agreed_A
        kept_A1 = teacher_AK.logsumexp(-1, keepdim=True).clamp(max=-torch.finfo(teacher_AK.dtype).eps)
        teacher_AK = torch.cat([teacher_AK, torch.log(-torch.expm1(kept_A1))], dim=-1)
        return divergence(teacher_AK, policy_AK, self.kind, self.beta), agreed_A

    def _of_tokens(self, logprobs_AV: Tensor, tokens_AK: Tensor) -> Tensor:
        """Log-probs of some tokens as a distribution, with the others as the last one if there is a tail.

        Source of the tail: Hübotter et al. 2026 (SDPO), arXiv 2601.20802, and its code, `distillation_add_tail`.
        """
        chosen_AK = logprobs_AV.gather(-1, tokens_AK)
        if not self.tail:
            return chosen_AK.log_softmax(-1)
        others_A1 = logprobs_AV.scatter(-1, tokens_AK, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat([chosen_AK, others_A1], dim=-1)


@dataclass(frozen=True)
class HeadStates:
    """A teacher's hidden states before a lesson's actions, and its head: its distributions follow from them."""

    states_AE: Tensor
    weight_VE: Tensor
    bias_V: Tensor | None
    rule: LogitRule


@dataclass(frozen=True)
class TopTokens:
    """A teacher's likeliest tokens at a lesson's actions, in falling order, and log-probs among all tokens."""

    ids_AK: Tensor
    logprobs_AK: Tensor


@dataclass(frozen=True)
class Lesson:
    """A teacher's distributions at some of a micro-batch's actions."""

    actions_A: Tensor
    """Indices of the lesson's actions among the micro-batch's."""
    given: HeadStates | TopTokens


def policy_divergence(
    states_AD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    lesson: Lesson,
    rule: LogitRule,
    comparison: Comparison,
    *,
    kept_bytes: int,
) -> tuple[Tensor, Tensor]:
    """Divergence from a teacher at a lesson's actions, differentiable by states, weight and bias, and agreement.

    Args:
        states_AD: of all actions of the micro-batch.
        kept_bytes: most memory for the logits; above it they are computed in chunks, twice.

    Returns: both fp32, of the lesson's actions; see `Comparison.of_logits`.
    """
    states_AD = states_AD.index_select(0, lesson.actions_A)
    row_bytes = _LIVE_TENSORS * 4 * len(weight_VD)
    rows = max(_FEWEST_ROWS, kept_bytes // row_bytes)
    given = lesson.given

    def compare(own_AD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, part: slice) -> tuple[Tensor, Tensor]:
        policy_AV = _logits(own_AD, weight_VD, bias_V, rule)
        if isinstance(given, TopTokens):
            return comparison.of_top(TopTokens(given.ids_AK[part], given.logprobs_AK[part]), policy_AV)
        with torch.no_grad():
            teacher_AV = _logits(given.states_AE[part], given.weight_VE, given.bias_V, given.rule)
        return comparison.of_logits(teacher_AV, policy_AV)

    if len(states_AD) <= rows:
        return compare(states_AD, weight_VD, bias_V, slice(None))
    parts = []
    for first in range(0, len(states_AD), rows):
        part = slice(first, first + rows)
        own_AD = states_AD[part]
        parts.append(
            checkpoint(compare, own_AD, weight_VD, bias_V, part, use_reentrant=False, preserve_rng_state=False)
        )
    divergence_A, agreed_A = (torch.cat(values) for values in zip(*parts, strict=True))
    return divergence_A, agreed_A


def _logits(states_AD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, rule: LogitRule) -> Tensor:
    """Logits, at least fp32; the operations of `LogitRule.logits`, none of them in place, for autograd."""
    product_AV = torch.nn.functional.linear(states_AD, weight_VD, bias_V)
    logits_AV = product_AV if product_AV.dtype == torch.float64 else product_AV.float()
    if rule.cap is not None:
        logits_AV = (logits_AV * (rule.factor / rule.cap)).tanh() * (rule.cap / rule.temperature)
    elif rule.scale != 1:
        logits_AV = logits_AV * rule.scale
    if not rule.impossible:
        return logits_AV
    tokens = torch.tensor(rule.impossible, device=logits_AV.device)
    return logits_AV.index_fill(-1, tokens, IMPOSSIBLE)
