"""How long sequences a model was made for."""

from pathlib import Path

from transformers import PreTrainedConfig

from slipstream.configs.errors import ConfigError
from slipstream.configs.schema import RunConfig


def check_positions(config: RunConfig, text: PreTrainedConfig, folder: Path) -> None:
    """Raises: ConfigError when the model in `folder`, whose text part is `text`, has too few learned positions."""
    positions = getattr(text, "max_position_embeddings", None)
    rotary = getattr(text, "rope_parameters", None) is not None  # these end nowhere
    if positions is not None and not rotary and positions < config.rollout.engine.max_model_len:
        raise ConfigError(
            f"rollout.engine.max_model_len={config.rollout.engine.max_model_len} is more than the {positions} "
            f"positions of {folder}; lower it"
        )
