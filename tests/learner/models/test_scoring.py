"""Scores of packed actions, compared with those that transformers computes for each sequence alone."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from slipstream.buffer.wire.codec import action_mask, token_ids
from slipstream.buffer.wire.messages import Trajectory
from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.data.buffer_feed import token_sequence
from slipstream.learner.data.packing import MicroBatch, pack
from slipstream.learner.models import attention
from slipstream.learner.models.scoring import check_head, score_actions
from tests.learner.recorded import VOCABULARY, trajectory

LENGTHS = (9, 9, 23, 4, 9, 2, 40, 17)
TOLERANCE = 1e-5


@pytest.fixture
def models(digits_model: Path) -> tuple[Any, Any]:
    """The same weights twice: with the learner's attention, and with that of transformers."""
    attention.register()
    packed, plain = (
        AutoModelForCausalLM.from_pretrained(digits_model, dtype=torch.float32, attn_implementation=name)
        for name in (attention.NAME, "eager")
    )
    return packed.train(), plain.train()


@pytest.fixture(scope="module")
def trajectories() -> list[Trajectory]:
    rng = np.random.default_rng(5)
    return [trajectory(rng, tokens=tokens) for tokens in LENGTHS]


def packed_whole(trajectories: Sequence[Trajectory]) -> MicroBatch:
    (batch,) = pack([token_sequence(each, {}) for each in trajectories], token_budget=sum(LENGTHS))
    return batch


def longest_first(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """In the order of packing."""
    return sorted(trajectories, key=lambda each: -len(each.action_mask))


def unpacked_logits(model: Any, trajectories: Sequence[Trajectory]) -> Tensor:
    """Logits [A, V] that predict each action, one forward pass a sequence."""
    rows = []
    for each in longest_first(trajectories):
        tokens = torch.from_numpy(token_ids(each).astype(np.int64))
        predicting = torch.from_numpy(np.flatnonzero(action_mask(each)) - 1)
        rows.append(model(input_ids=tokens[None], use_cache=False).logits[0, predicting])
    return torch.cat(rows)


@pytest.mark.parametrize("entropy", ["value", "gradient"])
def test_scores_are_of_sampled_distribution(
    models: tuple[nn.Module, nn.Module], trajectories: list[Trajectory], entropy: Literal["value", "gradient"]
) -> None:
    batch = packed_whole(trajectories)
    distribution = torch.distributions.Categorical(logits=unpacked_logits(models[1], trajectories) / 0.7)
    scored = score_actions(models[0], batch, temperature=0.7, entropy=entropy, collision=True)
    assert scored.entropy_A is not None and scored.collision_A is not None
    assert scored.entropy_A.requires_grad == (entropy == "gradient")
    for found_A, expected_A in (
        (scored.logprobs_A, distribution.log_prob(batch.actions_S)),
        (scored.entropy_A, distribution.entropy()),
        (scored.collision_A, distribution.probs.square().sum(-1)),
    ):
        torch.testing.assert_close(found_A, expected_A, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("setting", ["logit_scale", "logits_scaling", "lm_head_multiplier", "final_logit_softcapping"])
def test_head_of_another_formula_is_refused(models: tuple[Any, Any], setting: str) -> None:
    """The class of the model ignores the setting, so that it stands for a formula that is not known."""
    model, _ = models
    check = partial(check_head, model, vocabulary=VOCABULARY, dtype=torch.float32, device=torch.device("cpu"))
    check()
    setattr(model.config, setting, 0.5)
    with pytest.raises(ConfigError, match=type(model).__name__):
        check()
