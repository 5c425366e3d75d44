"""Log-probs of actions under the learner's weights, from the distribution that was sampled.

# A actions, V vocabulary
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.learner.packing import MicroBatch


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
        entropy, collision: also compute these; they cost another [A, V] tensor.
    """
    logits_1AV = model(
        input_ids=batch.input_ids_1N,
        position_ids=batch.position_ids_1N,
        logits_to_keep=batch.action_positions_A,
        # With a cache, attention over packed sequences on a CPU is silently wrong.
        use_cache=False,
        **batch.boundaries(),
    ).logits
    logits_AV = logits_1AV[0].float() / temperature
    logprobs_A = -F.cross_entropy(logits_AV, batch.actions_A, reduction="none")
    if not entropy and not collision:
        return ActionScores(logprobs_A)
    logprobs_AV = logits_AV.log_softmax(-1)
    return ActionScores(
        logprobs_A,
        entropy_A=-(logprobs_AV.exp() * logprobs_AV).sum(-1) if entropy else None,
        collision_A=(2 * logprobs_AV).exp().sum(-1) if collision else None,
    )
