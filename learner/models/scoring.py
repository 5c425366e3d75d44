"""Log-probs of actions under the learner's weights, from the distribution that was sampled.

# A actions, D hidden size, R further values
"""

from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.data.packing import MicroBatch, all_actions, pack
from slipstream.learner.models.fused_head import ActionScores, Entropy, LogitRule, score_states
from slipstream.learner.models.layers import backbone_of
from slipstream.learner.models.vision import unsampled_tokens, zero_of_encoder
from slipstream.learner.parallel.context import context_of

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.03}
"""Relative error of logits: larger than that of rounding, smaller than that of another formula."""
Readout = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Computes R further values of each action, shape [R, A], from hidden states, and weight and bias of the head."""
_METHOD = "score_hidden_states"
_STATES_METHOD = "hidden_states_and_head"
_CHECKED_TOKENS = 16


def score_actions(  # noqa: PLR0913  (all but two have defaults)
    model: nn.Module,
    batch: MicroBatch,
    *,
    temperature: float,
    entropy: Entropy = "none",
    collision: bool = False,
    whole_vocabulary: bool = False,
    targets: bool = False,
    kept_bytes: int = 0,
    readout: Readout | None = None,
) -> ActionScores:
    """log π of the batch's actions; a collective where its tokens are split over ranks.

    Logits are computed only where an action is predicted, a tile of the vocabulary at a time, and divided by the
    sampling temperature: the engine draws from that distribution.

    Args:
        entropy: also compute it, as a value or with its gradient.
        collision: also compute it, without gradient.
        whole_vocabulary: give probability also to tokens that are never sampled.
        targets: also compute log π of the batch's targets, at temperature 1; else it is 0, as the rest of their scores.
        kept_bytes: most memory for logits that are kept for the backward pass; it computes others a second time.
        readout: called for the actions of each rank's share of the tokens.
    """
    share = batch.split(context_of(model))
    rule = LogitRule.of(model, temperature=temperature, whole_vocabulary=whole_vocabulary)
    scores = score_share(
        model,
        share,
        rule,
        entropy=entropy,
        collision=collision,
        targets=targets,
        kept_bytes=kept_bytes,
        readout=readout,
    )
    return ActionScores(
        share.of_whole(scores.logprobs_A),
        None if scores.entropy_A is None else share.of_whole(scores.entropy_A),
        None if scores.collision_A is None else share.of_whole(scores.collision_A),
        None if scores.further_RA is None else torch.stack([share.of_whole(each_A) for each_A in scores.further_RA]),
    )


def score_share(
    model: nn.Module,
    batch: MicroBatch,
    rule: LogitRule,
    *,
    entropy: Entropy = "none",
    collision: bool = False,
    targets: bool = False,
    kept_bytes: int = 0,
    readout: Readout | None = None,
) -> ActionScores:
    """`score_actions` of one rank's share of a micro-batch, for its actions only."""
    if not hasattr(model, _METHOD):
        setattr(model, _METHOD, MethodType(_score, model))
        # Then FSDP gathers the head before it, as before a forward pass, and reduces the head's gradient.
        register_fsdp_forward_method(model, _METHOD)
    scores: ActionScores = getattr(model, _METHOD)(batch, rule, entropy, collision, targets, kept_bytes, readout)
    return scores


def head_states(model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states before the actions of a share of a micro-batch, [A, D], and weight and bias of the head.

    The head stays gathered until the model is used or resharded; for passes without gradients.
    """
    if not hasattr(model, _STATES_METHOD):
        setattr(model, _STATES_METHOD, MethodType(_states_and_head, model))
        register_fsdp_forward_method(model, _STATES_METHOD)
    found: tuple[Tensor, Tensor, Tensor | None] = getattr(model, _STATES_METHOD)(batch)
    return found


def _states_and_head(model: Any, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
    head = model.get_output_embeddings()
    return _hidden_states(model, batch), head.weight, head.bias


def _score(
    model: Any,
    batch: MicroBatch,
    rule: LogitRule,
    entropy: Entropy,
    collision: bool,
    targets: bool,
    kept_bytes: int,
    readout: Readout | None,
) -> ActionScores:
    head, states_AD, actions_A = model.get_output_embeddings(), _hidden_states(model, batch), batch.actions_S

    def score(
        chosen_I: Tensor | None, rule: LogitRule, entropy: Entropy = "none", collision: bool = False
    ) -> ActionScores:
        """Scores of some of the tokens, 0 at the others; None: of all."""
        chosen = (
            (states_AD, actions_A)
            if chosen_I is None
            else (states_AD.index_select(0, chosen_I), actions_A.index_select(0, chosen_I))
        )
        scores = score_states(
            chosen[0], head.weight, head.bias, chosen[1], rule,
            entropy=entropy, collision=collision, kept_bytes=kept_bytes,
        )  # fmt: skip
        if chosen_I is None:
            return scores

        def spread(values_I: Tensor) -> Tensor:
            return values_I.new_zeros(len(actions_A)).index_put((chosen_I,), values_I)

        return ActionScores(
            spread(scores.logprobs_A),
            None if scores.entropy_A is None else spread(scores.entropy_A),
            None if scores.collision_A is None else spread(scores.collision_A),
        )

    further_RA = None if readout is None else readout(states_AD, head.weight, head.bias)
    if batch.is_target_A is None:
        return score(None, rule, entropy, collision)._replace(further_RA=further_RA)
    scores = score((~batch.is_target_A).nonzero()[:, 0], rule, entropy, collision)._replace(further_RA=further_RA)
    if not targets:
        return scores
    of_targets = score(batch.is_target_A.nonzero()[:, 0], replace(rule, temperature=1.0))
    return scores._replace(logprobs_A=scores.logprobs_A + of_targets.logprobs_A)


def _hidden_states(model: Any, batch: MicroBatch) -> Tensor:
    """Hidden state before each action, shape [A, D]."""
    states_1ND = backbone_of(model)(**batch.model_inputs()).last_hidden_state
    # Not by indexing, whose backward pass sorts the positions.
    states_AD: Tensor = states_1ND[0].index_select(0, batch.action_positions_S)
    if batch.pixels_PD is None and (zero := zero_of_encoder(model)) is not None:
        states_AD = states_AD + zero
    return states_AD


@torch.no_grad()
def check_head(model: nn.Module, *, vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compares scores with those from the model's own logits, for a few tokens; a collective.

    Raises: ConfigError when they differ: then the model computes logits by a formula that `LogitRule` lacks.
    """
    tokens = np.setdiff1d(np.arange(min(vocabulary, 4 * _CHECKED_TOKENS)), unsampled_tokens(model))[:_CHECKED_TOKENS]
    (batch,) = pack([all_actions(tokens)], token_budget=len(tokens))
    batch = batch.to(device)
    found_A = score_share(model, batch, LogitRule.of(model, whole_vocabulary=True)).logprobs_A
    logits_AV = model(**batch.model_inputs()).logits[0].float()
    expected_A = logits_AV.log_softmax(-1).gather(1, batch.actions_S[:, None])[:, 0]
    off = float((found_A - expected_A).abs().mean() / logits_AV.std())
    if not off <= TOLERANCE[dtype]:  # NaN neither
        raise ConfigError(
            f"{type(model).__name__} can't be trained by this learner: log-probs from its head differ by {off:.1%} of "
            "the spread of its logits from those that it computes itself; choose another model"
        )
