"""Vision-language models: their class, attention, frozen encoder, and the tokens that are never sampled."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from slipstream.configs.models import VISION_FAMILIES, placeholder_tokens


def auto_class(model_type: str) -> Any:
    """The class of transformers that loads models of a type."""
    return AutoModelForImageTextToText if model_type in VISION_FAMILIES else AutoModelForCausalLM


def attention_by_part(model_type: str, attention: str) -> str | Mapping[str, str]:
    """The attention over packed sequences, for the language part only: an encoder has windows of its own."""
    return {"text_config": attention} if model_type in VISION_FAMILIES else attention


def freeze_encoder(model: Any) -> None:
    """Excludes the vision encoder of a model, if it has one, from training."""
    encoder = getattr(getattr(model, "model", None), "visual", None)
    if isinstance(encoder, nn.Module):
        encoder.requires_grad_(False)


def unsampled_tokens(model: nn.Module) -> tuple[int, ...]:
    """Tokens that no engine samples from the model: they stand for images."""
    config = getattr(model, "config", None)
    return placeholder_tokens(config.to_dict()) if isinstance(config, PreTrainedConfig) else ()
