"""Tiny random models of the families that the learner trains."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import transformers
from transformers import AutoModelForCausalLM, logging

from tests.contract.experts import change

WINDOW = 6  # tokens
_SIZES: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_HEADS = {"head_dim": 32}  # vLLM's CPU attention refuses smaller ones
_WINDOWS = {**_HEADS, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA_NET = {
    **_HEADS,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


@dataclass(frozen=True)
class Family:
    """Models of one architecture.

    Attributes:
        config: class of their configs in transformers.
        settings: of the tiny model, beside the sizes of all.
        vllm: dtype in which vLLM runs them on a CPU; None: it can't.
        soak: vLLM's part is checked only with `-m soak`: another family, or `test_experts`, shows the same, or it takes
            long to start.
    """

    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    vllm: Literal["float32", "bfloat16"] | None = "float32"
    soak: bool = True

    @property
    def architecture(self) -> str:
        """Name of the models' class in transformers."""
        model: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[getattr(transformers, self.config)]
        return str(model.__name__)


FAMILIES: dict[str, Family] = {
    "Llama": Family("LlamaConfig", {**_HEADS, "rope_parameters": _rope(1e4)}),
    "SmolLM2": Family("LlamaConfig", {**_HEADS, "tie_word_embeddings": True}),
    "SmolLM3": Family("SmolLM3Config", {**_HEADS, "no_rope_layers": [1, 0]}),
    "Qwen2.5": Family("Qwen2Config"),
    "Qwen3": Family("Qwen3Config", _HEADS),
    "Mistral": Family("MistralConfig", {**_HEADS, "sliding_window": WINDOW}),
    "Gemma 2": Family(
        "Gemma2Config", {**_WINDOWS, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 6.0}, soak=False
    ),
    "Gemma 3": Family(
        "Gemma3TextConfig",
        {**_WINDOWS, "rope_parameters": {"sliding_attention": _rope(1e2), "full_attention": _rope(1e4)}},
        soak=False,
    ),
    "Phi-2": Family("PhiConfig"),
    "Phi-3": Family("Phi3Config"),
    "Mixtral": Family("MixtralConfig", {**_HEADS, "num_local_experts": 4}),
    "Qwen3-MoE": Family("Qwen3MoeConfig", {**_HEADS, **_EXPERTS}, soak=False),
    "GLM-4.5": Family(
        "Glm4MoeConfig",
        {**_HEADS, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "first_k_dense_replace": 0},
    ),
    "DeepSeek-V3": Family(
        "DeepseekV3Config",
        {
            "num_key_value_heads": 2,
            "q_lora_rank": 16,
            "kv_lora_rank": 512,  # which, with 64, vLLM's attention on a CPU requires
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            # Also as released: vLLM's kernel for rotary positions without scaling is wrong on a CPU.
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            "topk_method": "noaux_tc",  # as released models have it, for vLLM
            "scoring_func": "sigmoid",
        },
        soak=False,
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2,
         "rope_parameters": {**_YARN, "truncate": False}},
        soak=False,
    ),
    "Qwen3-Next": Family(
        "Qwen3NextConfig", {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 32}, vllm="bfloat16"
    ),
    "Qwen3.5": Family("Qwen3_5TextConfig", _DELTA_NET, vllm=None),
    "LFM2": Family(
        "Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_dim": 64, "conv_dim": 64}, vllm="bfloat16"
    ),
    "Granite 4": Family(
        "GraniteMoeHybridConfig",
        {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16,
         "mamba_chunk_size": 8, "num_local_experts": 0, "shared_intermediate_size": 64},
    ),
    "Falcon-H1": Family(
        "FalconH1Config",
        {**_HEADS, "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1,
         "mamba_chunk_size": 8},
    ),
    "Nemotron-H": Family(
        "NemotronHConfig",
        {**_HEADS, "hybrid_override_pattern": "M*-", "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16,
         "n_groups": 1, "chunk_size": 8},
    ),
}  # fmt: skip


def write_family(folder: Path, name: str, *, seed: int = 0, **sizes: int) -> None:
    """Writes a model of one of `FAMILIES`, with other sizes than the usual ones where some are given."""
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**{**_SIZES, **family.settings, **sizes})
    model = AutoModelForCausalLM.from_config(config)
    change(model, seed=seed)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
