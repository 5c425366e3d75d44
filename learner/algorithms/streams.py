"""Losses of the streams beside the policy loss, each a mean over the tokens of its stream on all ranks.

A step's loss is w_rl · L_rl + w_ce · L_ce + w_ref · L_ref; L_rl is the policy loss. A token's loss is multiplied by the
weight of its env. The mean's divisor is the number of the stream's tokens, whatever their weights above 0.

# B rows (trajectories) of a step or micro-batch, T scored tokens of the longest
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stream:
    """The tokens of a stream in a step."""

    mask_BT: Tensor
    """1.0 at its tokens."""
    weights_B1: Tensor
    """Weight of each row's env."""
    reference_logprobs_BT: Tensor | None = None
    """log π_ref of the actions for `distillation` from a reference; None: there are teachers, or it is `ce`."""


def cross_entropy(logprobs_BT: Tensor) -> Tensor:
    """-log π_θ of the targets, in nats, shape [B, T].

    For what an env shows after an action it is ECHO: L_ce = -1/N · Σ log π_θ(o | all tokens before) over the N tokens
    of observations, of good and bad episodes alike.

    Source: Shrivastava et al. 2026 (ECHO), arXiv 2605.24517, with weight 0.05.
    """
    return -logprobs_BT


def distillation(logprobs_BT: Tensor, reference_logprobs_BT: Tensor) -> Tensor:
    """-r · sg[log π_ref - log π_θ] with r = π_θ/sg[π_θ], shape [B, T].

    A policy gradient whose advantage is log π_ref - log π_θ of the action itself. For actions drawn from π_θ the value
    is an unbiased estimate of KL(π_θ‖π_ref) at each of them, with the gradient of that.

    Source: Lu et al. 2025, thinkingmachines.ai/blog/on-policy-distillation.
    """
    advantages_BT = reference_logprobs_BT - logprobs_BT.detach()
    return -torch.exp(logprobs_BT - logprobs_BT.detach()) * advantages_BT


def stream_mean(loss_BT: Tensor, mask_BT: Tensor, tokens: float) -> Tensor:
    """A micro-batch's part of a stream's loss, a scalar; the loss is the sum over micro-batches and ranks.

    Args:
        mask_BT: 1.0 at the stream's tokens.
        tokens: number of these in the whole update, on all ranks.
    """
    return loss_BT.where(mask_BT > 0, 0.0).sum() / max(tokens, 1.0)
