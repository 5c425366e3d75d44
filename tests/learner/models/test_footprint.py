"""Sizes of models and of their activations, from configurations."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Qwen3Config, Qwen3MoeConfig

from slipstream.learner.models.footprint import activation_bytes, model_size
from slipstream.learner.models.layers import Checkpointing
from tests.contract.families import write_family

QWEN3 = Qwen3Config(
    vocab_size=1000, hidden_size=256, intermediate_size=768, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
)  # fmt: skip
MOE = Qwen3MoeConfig(
    vocab_size=1000, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2,
)  # fmt: skip


def activations(config: Qwen3Config, tokens: int, checkpointing: Checkpointing, **options: int) -> int:
    found = activation_bytes(config, tokens=tokens, dtype=torch.bfloat16, checkpointing=checkpointing, **options)
    assert 0 < found.kept < found.peak
    return found.peak


def test_sizes_count_tied_weights_once() -> None:
    size = model_size(QWEN3)
    assert size.root == 1000 * 256 + 256 and size.head == 1000 * 256
    assert size.matrices == 3 * (256 * 256 * 2 + 2 * 256 * 128 + 3 * 256 * 768)
    assert size.dense - size.matrices == 3 * (2 * 256 + 2 * 64)
    assert (size.layers, size.experts) == (3, 0)


def test_sizes_count_experts_apart() -> None:
    size = model_size(MOE)
    assert size.experts == 2 * size.largest_experts == 2 * 8 * 3 * 256 * 128
    assert size.root == 2 * 1000 * 256 + 256


def test_activations_grow_with_tokens_and_shrink_with_checkpointing() -> None:
    by_mode = {mode: activations(QWEN3, 512, mode) for mode in ("none", "selective", "full")}
    assert by_mode["full"] < by_mode["selective"] < by_mode["none"]
    assert activations(QWEN3, 1024, "full") == pytest.approx(2 * by_mode["full"], rel=0.01)
    # `full` keeps the input of each layer.
    deeper = Qwen3Config(**(QWEN3.to_dict() | {"num_hidden_layers": 6, "layer_types": None}))
    assert activations(deeper, 512, "full") - by_mode["full"] == pytest.approx(3 * 512 * 256 * 2, rel=0.1)


def test_tensor_parallel_ranks_have_parts_of_the_width() -> None:
    whole, part = (activations(QWEN3, 512, "none", tensor_parallel=ranks) for ranks in (1, 2))
    assert 0.5 * whole < part < 0.8 * whole


@pytest.mark.parametrize("family", ["LFM2", "Falcon-H1"])
def test_layers_of_several_kinds_are_estimated(family: str, tmp_path: Path) -> None:
    write_family(tmp_path, family)
    config = AutoConfig.from_pretrained(tmp_path)
    whole, recomputed = (
        activation_bytes(config, tokens=64, dtype=torch.bfloat16, checkpointing=mode).peak for mode in ("none", "full")
    )
    assert whole > recomputed > 2 * 64 * config.hidden_size * 2, "the inputs of both layers"
