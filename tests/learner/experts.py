"""A tiny mixture of experts, and recorded groups with random experts for each token."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, logging

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode
from slipstream.configs import RunConfig
from slipstream.models.digits import build_digits_model
from tests.learner.recorded import VOCABULARY, step_groups

LAYOUT = m.ExpertLayout(layers=2, per_token=2, experts=4)


def build_experts(seed: int = 0) -> Any:
    """A Qwen3-MoE of three layers, of which the second has no experts."""
    configure: Any = Qwen3MoeConfig  # its declaration lacks head_dim
    config = configure(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=128,
        num_experts=LAYOUT.experts, num_experts_per_tok=LAYOUT.per_token, norm_topk_prob=True, mlp_only_layers=[1],
    )  # fmt: skip
    build: Any = Qwen3MoeForCausalLM
    model = build(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2, generator=generator)
    return model


def write_experts(folder: Path) -> None:
    """Writes the model with the digits tokenizer."""
    build_digits_model(folder, seed=0)
    logging.disable_progress_bar()
    build_experts().save_pretrained(folder)


def random_experts(rng: np.random.Generator, tokens: int) -> m.RoutedExperts:
    """Random experts of the last input tokens of a sequence, those of one token all different."""
    shape = (tokens, LAYOUT.layers, LAYOUT.experts)
    ids = rng.random(shape).argsort(-1)[..., : LAYOUT.per_token].astype(LAYOUT.dtype)
    return m.RoutedExperts(layout=LAYOUT, ids=ids.tobytes())


def record_with_experts(folder: Path, steps: int, config: RunConfig) -> None:
    """As `record`; of every third trajectory the experts are unknown, of others those of its first tokens."""
    folder.mkdir()
    for step in range(steps):
        for number, group in enumerate(step_groups(step, config)):
            rng = np.random.default_rng([7, step, number])
            trajectories = [
                each
                if index % 3 == 0
                else msgspec.structs.replace(
                    each, routed_experts=random_experts(rng, len(each.action_mask) - 1 - (index % 3 - 1) * 2)
                )
                for index, each in enumerate(group.trajectories)
            ]
            group = msgspec.structs.replace(group, trajectories=trajectories)  # noqa: PLW2901
            (folder / f"{step}-{number}.msgpack").write_bytes(encode(group))
