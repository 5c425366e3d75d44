"""Attention over packed sequences: causal within each sequence, limited to the model's window."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.models import attention
from slipstream.learner.models.attention import segments_attention

HEAD_DIM = 8
SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
WINDOW = 5
LENGTHS = [[5], [7, 7, 7], [9, 4, 4, 1], [1, 6, 1], [3, 8, 3]]


def random_states(lengths: list[int], *, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    query, key, value = (
        torch.randn(1, count, sum(lengths), HEAD_DIM, generator=generator, dtype=torch.float64, requires_grad=True)
        for count in (heads, key_heads, key_heads)
    )
    return query, key, value


def masked_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scaling: float) -> Tensor:
    """Attention from all scores and a mask, [1, T, H, D]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    visible = (sequence[:, None] == sequence[None]).tril()
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~visible, -math.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_output_and_gradients_equal_masked_attention(lengths: list[int], key_heads: int) -> None:
    states = random_states(lengths, heads=4, key_heads=key_heads)
    out, weights = segments_attention(torch.nn.Identity(), *states, None, segment_lengths=lengths, scaling=0.3)
    reference = masked_attention(*states, lengths, scaling=0.3)
    torch.testing.assert_close(out, reference)
    assert weights is None
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    torch.testing.assert_close(
        torch.autograd.grad((out * direction).sum(), states), torch.autograd.grad((reference * direction).sum(), states)
    )


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_any_lengths_equal_masked_attention(lengths: list[int]) -> None:
    states = random_states(lengths, heads=2, key_heads=1)
    out, _ = segments_attention(torch.nn.Identity(), *states, None, segment_lengths=lengths)
    torch.testing.assert_close(out, masked_attention(*states, lengths, scaling=HEAD_DIM**-0.5))


def test_mask_is_refused() -> None:
    states = random_states([4], heads=1, key_heads=1)
    with pytest.raises(ValueError, match="segment_lengths"):
        segments_attention(torch.nn.Identity(), *states, torch.ones(1, 1, 4, 4), segment_lengths=[4])


def build(model: Any, config: Any) -> Any:
    """The model with weights large enough that its attention matters."""
    torch.manual_seed(0)
    built = model(config).eval()
    for parameter in built.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return built


@torch.no_grad()
def logprobs(model: Any, implementation: str, lengths: list[int]) -> Tensor:
    """Of packed sequences of the same tokens, shape [T, V]."""
    model.set_attn_implementation(implementation)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    logits = model(
        input_ids=positions * 7 % SMALL["vocab_size"],
        position_ids=positions,
        use_cache=False,
        segment_lengths=tuple(lengths),
    ).logits
    found: Tensor = logits[0].log_softmax(-1)
    return found


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=WINDOW)),
        (
            Gemma3ForCausalLM,
            Gemma3TextConfig(**SMALL, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]),
        ),
        (PhimoeForCausalLM, PhimoeConfig(**SMALL, num_local_experts=2, sliding_window=WINDOW)),
        (
            Qwen2MoeForCausalLM,
            Qwen2MoeConfig(**SMALL, num_experts=4, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
        ),
        (Llama4ForCausalLM, Llama4TextConfig(**SMALL, num_local_experts=2, attention_chunk_size=WINDOW)),
    ],
    ids=["mistral", "gemma3", "phimoe", "qwen2-moe", "llama4-chunks"],
)
def test_attention_is_limited_to_window_of_model(model: Any, config: Any) -> None:
    built = build(model, config)
    attention.register()
    lengths = [WINDOW + 8, WINDOW + 1, WINDOW + 1, WINDOW, 2]
    alone = torch.cat([logprobs(built, "eager", [length]) for length in lengths])
    torch.testing.assert_close(logprobs(built, "segments", lengths), alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("model", "config", "problem"),
    [
        (Gemma2ForCausalLM, Gemma2Config(**SMALL), "Gemma2Attention .*50.*learner.attention=flash"),
        (GptOssForCausalLM, GptOssConfig(**SMALL), "GptOssAttention .*sinks"),
    ],
    ids=["gemma2", "gpt-oss"],
)
def test_unimplemented_attention_features_are_refused(model: Any, config: Any, problem: str) -> None:
    built = build(model, config)
    attention.register()
    with pytest.raises(ConfigError, match=problem):
        logprobs(built, "segments", [6, 3])
