"""Aggregation of the losses of an update's actions to one number, over all its micro-batches and ranks.

The sequences of `seq-mean-…` are trajectories: an episode that left several counts as several.

# B rows (trajectories) of one micro-batch, T actions of the longest
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.configs.schema.losses import Aggregation


@dataclass(frozen=True)
class Totals:
    """Counts of an update that its loss is averaged over; without rejected actions."""

    tokens: float
    """Actions in the loss."""
    sequences: float
    """Trajectories with at least one of these."""


def totals_of(*masks_BT: Tensor, total: Callable[[Tensor], Tensor] = torch.clone) -> Totals:
    """Counts of an update from the masks of its micro-batches.

    Args:
        total: sums counts over the ranks.
    """
    tokens_of = [mask_BT.sum(-1) for mask_BT in masks_BT]
    counts = [torch.stack([tokens_B.sum(), (tokens_B > 0).sum()]).double() for tokens_B in tokens_of]
    # Read once: each time the host waits for the GPU.
    return Totals(*total(torch.stack(counts).sum(0)).tolist())


def aggregate(
    values_BT: Tensor,
    mask_BT: Tensor,
    mode: Aggregation,
    totals: Totals,
    *,
    horizon: float,
    constant: float | None,
) -> Tensor:
    """A micro-batch's part of the update's loss, a scalar; the loss is the sum over micro-batches and ranks.

    Args:
        mask_BT: 1.0 where an action is in the loss; a row holds all actions of its trajectory.
        totals: of the whole update, on all ranks.
        horizon: divisor of the token sums in `seq-mean-token-sum-norm`: the longest permitted answer.
        constant: divisor of the sum in `constant`.

    Source: seq-mean-token-sum-norm: Dr. GRPO, arXiv 2503.20783.
    """
    sums_B = values_BT.where(mask_BT > 0, 0.0).sum(-1)
    if mode == "seq-mean-token-mean":
        sums_B = sums_B / mask_BT.sum(-1).clamp(min=1)
    return sums_B.sum() / _divisor(mode, totals, horizon, constant)


def _divisor(mode: Aggregation, totals: Totals, horizon: float, constant: float | None) -> float:
    if mode == "token-sum":
        return 1.0
    if mode == "constant":
        assert constant is not None, "the configuration pairs `aggregation: constant` with a constant"
        return constant
    # At least 1: the loss of an update without actions is 0.
    if mode == "token-mean":
        return max(totals.tokens, 1.0)
    sequences = max(totals.sequences, 1.0)
    return sequences * horizon if mode == "seq-mean-token-sum-norm" else sequences
