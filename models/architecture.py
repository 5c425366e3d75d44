"""Facts about a model's architecture, by its config.json or its modules."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from slipstream.configs.runtime.errors import ConfigError

VISION_FAMILIES: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Model types whose images are played and trained on."""
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN: Final = ("num_experts_per_tok", "top_k_experts")
_PLACEHOLDERS: Final = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def read_config(model: Path) -> dict[str, Any]:
    """The content of config.json; empty if there is none. Raises: ConfigError for a damaged one."""
    file = model / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of the encoding, too
        raise ConfigError(f"{file} is damaged: {error}; copy the model again") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is damaged: it holds no JSON object; copy the model again")
    return config


def vocabulary_size(model: Path) -> int:
    """Number of token ids that the model in a folder accepts, which may be more than its tokenizer has.

    Raises: ConfigError when its config.json does not give it.
    """
    config = read_config(model)
    for section in (config, config.get("text_config", {})):  # the latter in models of several modalities
        if isinstance(section.get("vocab_size"), int):
            return int(section["vocab_size"])
    raise ConfigError(f"{model / 'config.json'} has no vocab_size; choose a causal language model")


def takes_images(model: Path) -> bool:
    """True if the model in a folder is a vision-language model of a family that is supported."""
    return read_config(model).get("model_type") in VISION_FAMILIES


def has_latent_attention(model: Path) -> bool:
    """True for multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of a low rank."""
    return bool(read_config(model).get("kv_lora_rank"))


def placeholder_tokens(model: Path | Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that stand for images and videos, of a model's folder or of its config.json; none of a text model.

    They are never sampled: an answer with one could not be given back to the model.
    """
    config = read_config(model) if isinstance(model, Path) else model
    if config.get("model_type") not in VISION_FAMILIES:
        return ()
    return tuple(sorted(config[key] for key in _PLACEHOLDERS if isinstance(config.get(key), int)))


def expert_count(text: Any) -> int:
    """Number of a layer's experts, of the text part of a transformers config; 0 without any."""
    return next((count for name in _EXPERTS if (count := getattr(text, name, None))), 0)


def experts_per_token(text: Any) -> int:
    """Number of experts that a token is sent to, as above; 0 without any, and for a family with another name for it."""
    return next((count for name in _EXPERTS_PER_TOKEN if (count := getattr(text, name, None))), 0)


def router_sizes(module: Any) -> tuple[int, int] | None:
    """Numbers of experts, and of those for each token, of a router of transformers; None for another module."""
    experts, per_token = getattr(module, "num_experts", None), getattr(module, "top_k", None)
    shape = getattr(getattr(module, "weight", None), "shape", ())
    if isinstance(experts, int) and isinstance(per_token, int) and shape[:1] == (experts,):
        return experts, per_token
    return None
