"""Operations of training, counted by hand and by PyTorch, and the peaks of GPUs."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from slipstream.learner.models.flops import ModelFlops, peak_flops_per_s
from tests.learner.experts import build_experts

HIDDEN, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD, VOCABULARY = 32, 48, 2, 4, 2, 16, 64


def dense_model(**changes: Any) -> Any:
    configure: Any = Qwen3Config
    config = configure(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD, tie_word_embeddings=False,
        attn_implementation="eager", **changes,
    )  # fmt: skip
    build: Any = Qwen3ForCausalLM
    return build(config)


def test_dense_model_by_hand() -> None:
    flops = ModelFlops.of_model(dense_model())
    attention = HIDDEN * HEAD * (HEADS + 2 * KV_HEADS) + HEADS * HEAD * HIDDEN
    weights = LAYERS * (attention + 3 * HIDDEN * WIDTH)
    pairs = 10 * 11 // 2 + 4 * 5 // 2
    scores = LAYERS * 2 * (2 * HEADS * HEAD) * pairs  # query times key, and weight times value
    assert flops([10, 4], actions=5) == 3 * (2 * weights * 14 + 2 * HIDDEN * VOCABULARY * 5 + scores)


def test_mixture_of_experts_by_hand() -> None:
    flops = ModelFlops.of_model(build_experts())
    # Three layers of 32; of four experts two are active, and the second layer has none, but an MLP.
    attention = 32 * 16 * (2 + 2) + 32 * 32
    expert, router = 3 * 32 * 32, 32 * 4
    weights = 3 * attention + 2 * (2 * expert + router) + expert
    scores = 3 * 2 * (2 * 2 * 16) * (6 * 7 // 2)
    assert flops([6], actions=0) == 3 * (2 * weights * 6 + scores)


def test_count_is_that_of_pytorch() -> None:
    model, tokens = dense_model(), 12
    # With attention over the whole square, which PyTorch counts.
    flops = ModelFlops.of_model(model)
    square = 3 * flops.pair_operations * LAYERS * (tokens * tokens - tokens * (tokens + 1) / 2)
    states = torch.randn(1, tokens, HIDDEN, requires_grad=True)
    with FlopCounterMode(display=False) as counted:
        model(inputs_embeds=states).logits.sum().backward()
    assert flops([tokens], actions=tokens) + square == counted.get_total_flops()


def test_frozen_weights_have_one_product_backward() -> None:
    model, whole = dense_model(), ModelFlops.of_model(dense_model())
    nn.Module.requires_grad_(model, False)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    frozen = ModelFlops.of_model(model)
    assert frozen.trained_weights == HIDDEN * WIDTH
    assert frozen.trained_weights + frozen.frozen_weights == whole.trained_weights
    saved = 2 * (7 * frozen.frozen_weights + 3 * HIDDEN * VOCABULARY)
    assert whole([7], actions=3) - frozen([7], actions=3) == saved


def test_windows_bound_the_pairs() -> None:
    kinds = ["sliding_attention", "full_attention"]
    flops = ModelFlops.of_model(dense_model(layer_types=kinds, use_sliding_window=True, sliding_window=4))
    assert flops.windows == {4: 1, None: 1}
    shorter = ModelFlops.of_model(dense_model())
    assert flops([3], actions=0) == shorter([3], actions=0)
    # Of 10 tokens, 55 pairs; with a window of 4: 10 for the first four, 4 for each of the others.
    assert shorter([10], actions=0) - flops([10], actions=0) == 3 * flops.pair_operations * (55 - 34)


@pytest.mark.parametrize(
    ("gpu", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 836), ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("NVIDIA A10G", 70),
        ("NVIDIA GeForce GTX 1080", None), ("", None),
    ],
)  # fmt: skip
def test_peaks_of_known_gpus(gpu: str, tflops: float | None) -> None:
    found = peak_flops_per_s(gpu, "bfloat16")
    assert found == (None if tflops is None else tflops * 1e12)
    assert peak_flops_per_s(gpu, "float32") is None
