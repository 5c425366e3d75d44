"""Log-probs of actions under the learner's weights, from the distribution that was sampled.

# A actions, C some of them, V vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.learner.data.packing import MicroBatch
from slipstream.learner.models.vision import unsampled_tokens, zero_of_encoder
from slipstream.learner.parallel.context import context_of

Entropy = Literal["none", "value", "gradient"]

IMPOSSIBLE = -1e30
"""Logit of a token that is never sampled; not -inf, of which 0 times it, in the entropy, would not be 0."""
LOGITS_AT_ONCE = 2**26
"""In fp32, of which a softmax holds several copies: those of 32,000 actions over 150,000 tokens fit on no GPU."""


@dataclass(frozen=True)
class ActionScores:
    """Scores of a batch's actions under a model, fp32."""

    logprobs_A: Tensor
    entropy_A: Tensor | None = None
    """Entropy of the distribution that each action was drawn from; None if not requested."""
    collision_A: Tensor | None = None
    """Sum of that distribution's squared probabilities; None if not requested."""


def score_actions(
    model: nn.Module,
    batch: MicroBatch,
    *,
    temperature: float,
    entropy: Entropy = "none",
    collision: bool = False,
    whole_vocabulary: bool = False,
) -> ActionScores:
    """log π of the batch's actions; a collective where its tokens are split over ranks.

    Logits are computed only where an action is predicted, and divided by the sampling temperature: the engine draws
    from that distribution.

    Args:
        entropy: also compute it, as a value or with its gradient, which takes the memory of one more softmax.
        collision: also compute it.
        whole_vocabulary: give probability also to tokens that are never sampled.
    """
    share = batch.split(context_of(model))
    scores = score_share(
        model, share, temperature=temperature, entropy=entropy, collision=collision, whole_vocabulary=whole_vocabulary
    )
    return ActionScores(
        share.of_whole(scores.logprobs_A),
        None if scores.entropy_A is None else share.of_whole(scores.entropy_A),
        None if scores.collision_A is None else share.of_whole(scores.collision_A),
    )


def score_share(
    model: nn.Module,
    batch: MicroBatch,
    *,
    temperature: float,
    entropy: Entropy = "none",
    collision: bool = False,
    whole_vocabulary: bool = False,
) -> ActionScores:
    """`score_actions` of one rank's share of a micro-batch, for its actions only."""
    logits_1AV = model(logits_to_keep=batch.action_positions_A, **batch.model_inputs()).logits
    logits_AV = logits_1AV[0]
    if batch.pixels_PD is None and (zero := zero_of_encoder(model)) is not None:
        logits_AV = logits_AV + zero
    unsampled = () if whole_vocabulary else unsampled_tokens(model)
    if unsampled:
        logits_AV = logits_AV.index_fill(1, torch.tensor(unsampled, device=logits_AV.device), IMPOSSIBLE)
    rows = max(1, LOGITS_AT_ONCE // logits_AV.shape[1])
    score = partial(_score, temperature=temperature, entropy=entropy, collision=collision)
    if len(logits_AV) <= rows:
        return ActionScores(*score(logits_AV, batch.actions_A))
    parts = [
        # The backward pass recomputes each part's softmax, so that only one is in memory.
        ActionScores(*checkpoint(score, *part, use_reentrant=False, preserve_rng_state=False))
        for part in zip(logits_AV.split(rows), batch.actions_A.split(rows), strict=True)
    ]
    return ActionScores(
        torch.cat([part.logprobs_A for part in parts]),
        _joined([part.entropy_A for part in parts]),
        _joined([part.collision_A for part in parts]),
    )


def _score(
    logits_CV: Tensor, actions_C: Tensor, *, temperature: float, entropy: Entropy, collision: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    logprobs_CV = (logits_CV.float() / temperature).log_softmax(-1)
    return (
        logprobs_CV.gather(1, actions_C[:, None])[:, 0],
        None if entropy == "none" else _entropy(logprobs_CV if entropy == "gradient" else logprobs_CV.detach()),
        (2 * logprobs_CV).exp().sum(-1) if collision else None,
    )


def _entropy(logprobs_CV: Tensor) -> Tensor:
    return -(logprobs_CV.exp() * logprobs_CV).sum(-1)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    computed = [part for part in parts if part is not None]
    return torch.cat(computed) if computed else None
