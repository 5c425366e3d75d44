"""Adapters (LoRA, by peft): their library, and the names of their tensors."""

import importlib.util

from slipstream.configs.runtime.errors import ConfigError


def require_peft() -> None:
    """Raises: ConfigError when peft, which `model.lora` needs, is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError('model.lora needs the package peft: pip install "slipstream[lora]"')


def adapter_tensor(parameter: str) -> str | None:
    """Name under which peft saves a parameter of an adapter; None for a parameter of the model itself."""
    if ".lora_A." not in parameter and ".lora_B." not in parameter:
        return None
    return "base_model.model." + parameter.replace(".default.", ".")
