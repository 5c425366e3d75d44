"""Scores of packed actions, compared with those that transformers computes for each sequence alone."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from slipstream.buffer.wire.codec import action_mask, token_ids
from slipstream.buffer.wire.messages import Trajectory
from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.data.buffer_feed import token_sequence
from slipstream.learner.data.packing import MicroBatch, empty_micro_batch, pack
from slipstream.learner.models import attention
from slipstream.learner.models.scoring import check_head, score_actions
from tests.learner.recorded import VOCABULARY, trajectory, vivid

LENGTHS = (9, 9, 23, 4, 9, 2, 40, 17)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def grouped_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Qwen3 with two query heads a key head, tied embeddings and three layers."""
    folder = tmp_path_factory.mktemp("grouped")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    build: Any = Qwen3ForCausalLM  # its constructor has no types
    build(config).save_pretrained(folder)
    vivid(folder)
    return folder


@pytest.fixture(params=["digits", "grouped"])
def models(request: pytest.FixtureRequest, digits_model: Path, grouped_model: Path) -> Iterator[tuple[Any, Any]]:
    """The same weights twice: with the learner's attention, and with that of transformers."""
    path = digits_model if request.param == "digits" else grouped_model
    attention.register()
    packed = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention.NAME)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    yield packed.train(), plain.train()


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


def unpacked_logprobs(model: Any, trajectories: Sequence[Trajectory], temperature: float) -> Tensor:
    actions = torch.cat(
        [
            torch.from_numpy(token_ids(each)[action_mask(each).astype(bool)].astype(np.int64))
            for each in longest_first(trajectories)
        ]
    )
    logits_AV = unpacked_logits(model, trajectories) / temperature
    return logits_AV.log_softmax(-1).gather(1, actions[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_log_probs_equal_unpacked_ones(
    models: tuple[nn.Module, nn.Module], trajectories: list[Trajectory], temperature: float
) -> None:
    packed, plain = models
    scored = score_actions(packed, packed_whole(trajectories), temperature=temperature)
    reference = unpacked_logprobs(plain, trajectories, temperature)
    assert scored.logprobs_A.shape == reference.shape
    assert (scored.logprobs_A - reference).abs().max() < TOLERANCE
    assert scored.entropy_A is None


def test_packed_gradients_equal_unpacked_ones(
    models: tuple[nn.Module, nn.Module], trajectories: list[Trajectory]
) -> None:
    packed, plain = models
    weights = torch.linspace(-1, 1, packed_whole(trajectories).actions)
    (score_actions(packed, packed_whole(trajectories), temperature=0.7).logprobs_A * weights).mean().backward()
    (unpacked_logprobs(plain, trajectories, 0.7) * weights).mean().backward()
    references = dict(plain.named_parameters())
    for name, parameter in packed.named_parameters():
        reference = references[name].grad
        assert parameter.grad is not None and reference is not None, name
        assert reference.abs().max() > 0, name
        torch.testing.assert_close(parameter.grad, reference, atol=TOLERANCE, rtol=1e-4, msg=name)


def test_log_probs_depend_on_boundaries(models: tuple[nn.Module, nn.Module], trajectories: list[Trajectory]) -> None:
    """A leak between sequences exceeds the tolerance of the other tests by far."""
    batch = packed_whole(trajectories)
    leaking = MicroBatch(**{**vars(batch), "segment_lengths": (sum(batch.segment_lengths),)})
    own, leaked = (score_actions(models[0], each, temperature=1.0).logprobs_A for each in (batch, leaking))
    assert (own - leaked).abs().max() > 1000 * TOLERANCE


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
        (scored.logprobs_A, distribution.log_prob(batch.actions_A)),
        (scored.entropy_A, distribution.entropy()),
        (scored.collision_A, distribution.probs.square().sum(-1)),
    ):
        torch.testing.assert_close(found_A, expected_A, atol=TOLERANCE, rtol=0)


def test_empty_micro_batch_has_backward_pass(models: tuple[nn.Module, nn.Module]) -> None:
    scored = score_actions(models[0], empty_micro_batch(), temperature=1.0, entropy="gradient")
    assert scored.logprobs_A.shape == (0,)
    scored.logprobs_A.sum().backward()
    for name, parameter in models[0].named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("setting", ["logit_scale", "logits_scaling", "lm_head_multiplier", "final_logit_softcapping"])
def test_head_of_another_formula_is_refused(models: tuple[Any, Any], setting: str) -> None:
    """The class of the model ignores the setting, so that it stands for a formula that is not known."""
    model, _ = models
    check = partial(check_head, model, vocabulary=VOCABULARY, dtype=torch.float32, device=torch.device("cpu"))
    check()
    setattr(model.config, setting, 0.5)
    with pytest.raises(ConfigError, match=type(model).__name__):
        check()
