"""Vision-language models: their class, attention, frozen encoder, and the tokens that are never sampled."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from slipstream.models.architecture import VISION_FAMILIES, placeholder_tokens


def auto_class(model_type: str) -> Any:
    """The class of transformers that loads models of a type."""
    return AutoModelForImageTextToText if model_type in VISION_FAMILIES else AutoModelForCausalLM


def attention_by_part(model_type: str, attention: str) -> str | Mapping[str, str]:
    """The attention over packed sequences, for the language part only: an encoder has windows of its own."""
    return {"text_config": attention} if model_type in VISION_FAMILIES else attention


def freeze_encoder(model: nn.Module) -> None:
    """Excludes the vision encoder of a model, if it has one, from training."""
    for parameter in _encoder(model):
        parameter.requires_grad_(False)


def zero_of_encoder(model: nn.Module) -> Tensor | None:
    """0 with a gradient of 0 for a vision encoder that is trained, for a batch without images; None without such.

    The ranks reduce the gradients of those parameters that have one: they must have them on all ranks.
    """
    trained = [parameter for parameter in _encoder(model) if parameter.requires_grad]
    return torch.stack([0 * parameter.sum() for parameter in trained]).sum() if trained else None


def _encoder(model: nn.Module) -> Iterable[nn.Parameter]:
    encoder = getattr(getattr(model, "model", None), "visual", None)
    return encoder.parameters() if isinstance(encoder, nn.Module) else ()


def unsampled_tokens(model: nn.Module) -> tuple[int, ...]:
    """Tokens that no engine samples from the model: they stand for images."""
    config = getattr(model, "config", None)
    return placeholder_tokens(config.to_dict()) if isinstance(config, PreTrainedConfig) else ()
