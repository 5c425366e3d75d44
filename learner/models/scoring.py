"""Log-probs of actions under the learner's weights, from the distribution that was sampled.

# A actions, C some of them, V vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.learner.data.packing import MicroBatch

LOGITS_AT_ONCE = 2**26
"""In fp32, of which a softmax holds several copies: those of 32,000 actions over 150,000 tokens fit on no GPU."""


@dataclass(frozen=True)
class ActionScores:
    """What the learner's weights say of a batch's actions, fp32."""

    logprobs_A: Tensor
    entropy_A: Tensor | None = None
    """Entropy of the distribution that each action was drawn from, if it was asked for."""
    collision_A: Tensor | None = None
    """Sum of that distribution's squared probabilities, if it was asked for."""


def score_actions(
    model: nn.Module, batch: MicroBatch, *, temperature: float, entropy: bool = False, collision: bool = False
) -> ActionScores:
    """log π of the batch's actions.

    Logits are computed where an action is predicted and nowhere else, and divided by the sampling temperature, because
    that is the distribution which the engine drew from.

    Args:
        entropy, collision: also compute these.
    """
    logits_1AV = model(
        input_ids=batch.input_ids_1N,
        position_ids=batch.position_ids_1N,
        logits_to_keep=batch.action_positions_A,
        # With a cache, attention over packed sequences on a CPU is silently wrong.
        use_cache=False,
        **batch.boundaries(),
    ).logits
    logits_AV = logits_1AV[0]
    rows = max(1, LOGITS_AT_ONCE // logits_AV.shape[1])
    score = partial(_score, temperature=temperature, entropy=entropy, collision=collision)
    if len(logits_AV) <= rows:
        return ActionScores(*score(logits_AV, batch.actions_A))
    parts = [
        # The backward pass works a part's softmax out again instead of keeping it.
        ActionScores(*checkpoint(score, *part, use_reentrant=False, preserve_rng_state=False))
        for part in zip(logits_AV.split(rows), batch.actions_A.split(rows), strict=True)
    ]
    return ActionScores(
        torch.cat([part.logprobs_A for part in parts]),
        _joined([part.entropy_A for part in parts]),
        _joined([part.collision_A for part in parts]),
    )


def _score(
    logits_CV: Tensor, actions_C: Tensor, *, temperature: float, entropy: bool, collision: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    logprobs_CV = (logits_CV.float() / temperature).log_softmax(-1)
    return (
        logprobs_CV.gather(1, actions_C[:, None])[:, 0],
        -(logprobs_CV.exp() * logprobs_CV).sum(-1) if entropy else None,
        (2 * logprobs_CV).exp().sum(-1) if collision else None,
    )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None
