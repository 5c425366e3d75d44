"""Loading of transformers models for training: read by rank 0, sharded over all ranks, checked for packing."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig

from slipstream.configs.models import without_remote_code
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.learner.data.packing import MicroBatch
from slipstream.learner.models import attention
from slipstream.learner.models.packing_check import as_config_error, check_packing
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.models.vision import attention_by_part, auto_class, freeze_encoder
from slipstream.learner.parallel.fsdp import reshard, shard
from slipstream.learner.parallel.mesh import World

log = get_log("learner.model")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of all models of a training."""

    dtype: torch.dtype
    """Of forward and backward passes; master weights are fp32."""
    attention: str
    """Attention over packed sequences: `segments` or `flash_attention_2`."""
    activation_checkpointing: bool = False
    train_vision_encoder: bool = False


def load_model(path: Path, options: ModelOptions, world: World) -> nn.Module:
    """The model of `path`, fp32 master weights sharded over all ranks; a collective.

    Raises: ConfigError, on all ranks, when the learner can't train it.
    """
    model = load_whole(path, options, world)
    shard_and_check(
        model, decoder_of(model), lambda batch: score_actions(model, batch, temperature=1.0), options, world
    )
    sharded: nn.Module = model
    return sharded


def load_whole(path: Path, options: ModelOptions, world: World) -> Any:
    """The transformers model of `path`, not sharded, in fp32; its weights are on rank 0 only; a collective.

    It is in evaluation mode, which has gradients, but neither dropout nor noise in the choice of experts: the engine
    samples without them.

    Raises: ConfigError, on all ranks, when rank 0 can't load it.
    """
    attention.register()
    model = _load_on_root(path, options.attention, world).eval()
    if not options.train_vision_encoder:
        freeze_encoder(model)
    if options.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for layer in decoder_of(model).layers:
            layer.training = True  # transformers checkpoints in no other mode; its submodules stay in evaluation mode
    dropouts = {name: p for name, p in model.config.to_dict().items() if "drop" in name and isinstance(p, float) and p}
    if dropouts:
        log.info("dropout is off, as in the engine", model=str(path), **dropouts)
    return model


def _load_on_root(path: Path, attention: str, world: World) -> Any:
    """The model of `path`; on ranks other than 0 its tensors have no data."""
    model: Any = None
    outcome: dict[str, Any] = {}
    if world.is_root:
        try:
            with as_config_error(str(path)), without_remote_code(path):
                kind = AutoConfig.from_pretrained(path, trust_remote_code=False).model_type
                model = auto_class(kind).from_pretrained(
                    path,
                    dtype=torch.float32,
                    attn_implementation=attention_by_part(kind, attention),
                    trust_remote_code=False,
                )
            outcome = {"config": model.config.to_json_string(use_diff=False)}
            own = (getattr(model.config, "auto_map", None) or {}).get("AutoModelForCausalLM")
            if own is not None:
                log.warning(
                    "code in the model's folder is not run: the model is trained as a class of transformers",
                    model=str(path),
                    code=own,
                    trained_as=type(model).__name__,
                )
        except ConfigError as error:
            outcome = {"problems": list(error.problems)}
    outcome = world.from_root(outcome)
    if "problems" in outcome:
        raise ConfigError(outcome["problems"])
    if model is None:
        fields = json.loads(outcome["config"])
        config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
        with torch.device("meta"):
            model = auto_class(config.model_type).from_config(
                config, dtype=torch.float32, attn_implementation=attention_by_part(config.model_type, attention)
            )
    return model


def vocabulary_of(model: Any) -> int:
    """Number of token ids of a transformers model; its tokenizer may have fewer."""
    size: int = model.config.get_text_config(decoder=True).vocab_size
    return size


def backbone_of(model: Any) -> Any:
    """A transformers model without its language head."""
    return getattr(model, "model", model.base_model)


def decoder_of(model: Any) -> Any:
    """The part of a transformers model that has its `layers`. Raises: ConfigError if there is none."""
    decoder = backbone_of(model).get_decoder()
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise ConfigError(f"{type(model).__name__} can't be trained by this learner: its decoder has no list `layers`")
    return decoder


def shard_and_check(
    model: nn.Module, decoder: Any, run: Callable[[MicroBatch], object], options: ModelOptions, world: World
) -> None:
    """Shards rank 0's model over all ranks and checks its packed sequences; a collective.

    Args:
        decoder: the part of it that has the layers.
        run: passes a micro-batch through the model.

    Raises: ConfigError when packed sequences influence each other.
    """
    shard(model, decoder.layers, dtype=options.dtype, world=world)
    check_packing(decoder, run, dtype=options.dtype, device=world.device)
    reshard(model)
