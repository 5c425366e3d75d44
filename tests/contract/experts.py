"""Tiny models whose experts, or routers, transformers has otherwise in memory than it saves them."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    logging,
)

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 0,
}
MODELS: dict[str, tuple[Any, Any]] = {
    "mixtral": (MixtralConfig, MixtralForCausalLM),  # renamed
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),  # put together
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),  # beside them a buffer, the bias by which they are chosen
}


def write_experts(folder: Path, kind: str, **sizes: int) -> None:
    """Writes one of `MODELS`, with other sizes than the usual ones where some are given."""
    config, model = MODELS[kind]
    made = model(config(**(_SIZES | sizes)))
    change(made, seed=0)
    logging.disable_progress_bar()
    made.save_pretrained(folder)


@torch.no_grad()
def change(model: Any, *, seed: int) -> None:
    """Draws everything that is saved anew; distributions are peaked."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.dim() > 1:
            tensor.normal_(std=0.2, generator=generator)
        else:
            low = 0.0 if name.endswith("bias") else 0.5
            tensor.uniform_(low, low + 1.0, generator=generator)
