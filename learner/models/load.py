"""Loading of transformers models for training: built without data, sharded, filled from the files, checked."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.learner import LearnerConfig
from slipstream.configs.schema.model import FLASH_IN_FLOAT32, LoraConfig, ModelConfig
from slipstream.learner.data.packing import MicroBatch
from slipstream.learner.models import attention
from slipstream.learner.models.fused_head import LogitRule
from slipstream.learner.models.fused_layers import fuse_layers
from slipstream.learner.models.layers import (
    Checkpointing,
    backbone_of,
    checkpoint_activations,
    compile_layers,
    decoder_of,
)
from slipstream.learner.models.lora import add_adapters, init_adapters, target_names
from slipstream.learner.models.moe import prepare_experts, routers
from slipstream.learner.models.packing_check import (
    TOLERANCE,
    as_config_error,
    check_packing,
    prefix_error,
    prefix_gradient_error,
)
from slipstream.learner.models.prefix_sharing import WITHOUT_TREES, share_prefixes_of, sharing_of
from slipstream.learner.models.recurrent import separate_sequences
from slipstream.learner.models.scoring import check_head, score_share
from slipstream.learner.models.vision import attention_by_part, auto_class, freeze_encoder
from slipstream.learner.models.weight_files import WeightFiles, WeightLoader
from slipstream.learner.parallel.context import ContextParallel, context_of, split_batches
from slipstream.learner.parallel.fsdp import allocate, broadcast_weights, reshard, shard
from slipstream.learner.parallel.mesh import World, refuse
from slipstream.learner.parallel.plans import parallelise
from slipstream.models.adapters import require_peft
from slipstream.models.folder import model_fingerprint, without_remote_code

log = get_log("learner.model")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of all models of a training."""

    dtype: torch.dtype
    """Precision of forward and backward passes; master weights are fp32."""
    attention: str
    """Attention over packed sequences, as `learner.attention`."""
    train_vision_encoder: bool = False
    lora: LoraConfig | None = None
    """Adapters of the policy; None: all of its weights are trained."""
    activation_checkpointing: Checkpointing = "none"
    offload: bool = False
    """Weights, gradients and optimizer in the host's memory."""
    compile: bool = False
    router_replay: bool = False
    """In a mixture of experts, choose the experts that the engine chose."""

    @classmethod
    def of(cls, model: ModelConfig, learner: LearnerConfig) -> Self:
        """Options of all models of a training."""
        return cls(
            dtype=getattr(torch, model.dtype_here),
            attention=learner.attention,
            activation_checkpointing=learner.activation_checkpointing,
            train_vision_encoder=model.train_vision_encoder,
            lora=model.lora,
            offload=learner.offload,
            compile=learner.compile,
            router_replay=learner.router_replay,
        )


def load_model(path: Path, options: ModelOptions, world: World) -> nn.Module:
    """The model of `path`, fp32 master weights sharded over all ranks; a collective.

    Raises: ConfigError, on all ranks, when the learner can't train it.
    """
    loader = build_model(path, options, world)
    model: nn.Module = loader.model
    if options.lora is not None:
        add_adapters(model, decoder_of(model), options.lora, dtype=options.dtype)
    load_and_check(loader, model, lambda share: score_share(model, share, LogitRule.of(model)), options, world)
    check_head(model, vocabulary=vocabulary_of(model), dtype=options.dtype, device=world.device)
    reshard(model)
    return model


def build_model(path: Path, options: ModelOptions, world: World) -> WeightLoader:
    """The transformers model of `path` without data, and the loader of its weights; a collective.

    It is in evaluation mode, which has gradients, but neither dropout nor noise in the choice of experts: the engine
    samples without them.

    Raises: ConfigError, on all ranks, when one can't build it, or has other files than rank 0.
    """
    attention.register()
    loader = world.on_all_ranks(lambda: _build(path, options, world))
    fingerprints = world.gather(model_fingerprint(path))
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise ConfigError(f"{path} has other files on learner rank {rank} than on rank 0; give all hosts the same")
    return loader


def load_and_check(
    loader: WeightLoader, trained: nn.Module, run: Callable[[MicroBatch], object], options: ModelOptions, world: World
) -> None:
    """Shards a model over all ranks, fills each rank's shards from the files and checks packed sequences; a collective.

    Args:
        loader: of the transformers model.
        trained: that model, or one that has parts of it.
        run: passes a share of a micro-batch through `trained`.

    Raises: ConfigError, on all ranks, when the files do not fit, or packed sequences influence each other.
    """
    decoder = decoder_of(loader.model)
    broadcast_weights(trained, world)
    parallelise(loader.model, world)
    shard(
        trained,
        decoder.layers,
        in_fp32=routers(trained),
        dtype=options.dtype,
        world=world,
        offload=options.offload,
    )
    allocate(trained, torch.device("cpu") if options.offload else world.device)

    def load() -> None:
        with as_config_error(str(loader.path)):
            loader.load(trained)
        init_adapters(trained)

    world.on_all_ranks(load)
    if world.sizes.cp > 1:
        split_batches(trained, world.mesh["cp"])
    context = context_of(trained)
    check_packing(decoder, run, dtype=options.dtype, device=world.device, context=context)
    if options.attention not in WITHOUT_TREES and not options.router_replay:
        rule = sharing_of(loader.model, world.device)
        share_prefixes_of(trained, rule if _may_share(decoder, run, options, world, context) else None)
    reshard(trained)


def _may_share(
    decoder: Any,
    run: Callable[[MicroBatch], object],
    options: ModelOptions,
    world: World,
    context: ContextParallel | None,
) -> bool:
    """True if the model computes the same where sequences share prefixes; a collective, the same on all ranks."""
    name = type(decoder).__name__
    try:
        with as_config_error(name):
            errors = {
                "hidden states": prefix_error(decoder, run, device=world.device, context=context),
                "gradients": prefix_gradient_error(decoder.config, dtype=options.dtype, device=world.device),
            }
        off = [f"{what} are off by {by:.1%}" for what, by in errors.items() if not by <= TOLERANCE[options.dtype]]
        reason = off[0] if off else None
    except ConfigError as problem:
        reason = str(problem)
    reasons = [found for found in world.gather(reason) if found is not None]
    if reasons and world.is_root:
        log.info("sequences do not share prefixes", model=name, reason=reasons[0])
    return not reasons


def check_model(path: Path, options: ModelOptions, *, language_head: bool = True) -> None:
    """Compares a model's files with its configuration, and the adapters' targets with its layers; no weight is read.

    Args:
        language_head: the files must have one.

    Raises: ConfigError when the learner can't train it.
    """
    attention.register()
    loader = _loader(path, _config(path), options)
    loader.require_complete(loader.model if language_head else backbone_of(loader.model))
    if options.lora is not None:
        require_peft()
        target_names(loader.model, decoder_of(loader.model), options.lora)


def _config(path: Path) -> Any:
    """The configuration of transformers. Raises: ConfigError."""
    with as_config_error(str(path)), without_remote_code(path):
        config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"the weights in {path} are quantized; choose the model in bfloat16 or float32")
    return config


def _loader(path: Path, config: Any, options: ModelOptions) -> WeightLoader:
    """The model without data, and the loader of its weights. Raises: ConfigError."""
    if options.dtype == torch.float32 and options.attention in attention.FLASH:
        raise ConfigError(FLASH_IN_FLOAT32.format(options.attention))
    with as_config_error(str(path)), without_remote_code(path):
        with _parameters_without_data():
            model: Any = auto_class(config.model_type).from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attention_by_part(config.model_type, options.attention),
                trust_remote_code=False,
            )
        model.eval()
        if not options.train_vision_encoder:
            freeze_encoder(model)
        return WeightLoader(model, path, WeightFiles(path))


def _build(path: Path, options: ModelOptions, world: World) -> WeightLoader:
    config = _config(path)
    refuse(world.sizes, config, adapters=options.lora is not None)
    loader = _loader(path, config, options)
    model = loader.model
    decoder = decoder_of(model)
    separate_sequences(decoder)
    prepare_experts(model, decoder.layers, replays=options.router_replay)
    checkpoint_activations(model, decoder.layers, options.activation_checkpointing)
    if options.compile:
        compile_layers(decoder.layers)
    elif options.dtype == torch.float32 and world.device.type == "cpu":
        fuse_layers(model)
    if world.is_root:
        _log_differences(path, model)
    return loader


def _log_differences(path: Path, model: Any) -> None:
    """Logs what the model's folder asks for and training does not do."""
    remote_code = (getattr(model.config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if remote_code is not None:
        log.warning(
            "code in the model's folder is not run: the model is trained as a class of transformers",
            model=str(path),
            code=remote_code,
            trained_as=type(model).__name__,
        )
    dropouts = {name: p for name, p in model.config.to_dict().items() if "drop" in name and isinstance(p, float) and p}
    if dropouts:
        log.info("dropout is off, as in the engine", model=str(path), **dropouts)


@contextmanager
def _parameters_without_data() -> Iterator[None]:
    """Context in which modules get parameters of the device "meta", and buffers with data: files may lack those."""

    def without_data(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook_function: Any = without_data  # typed as if it returned nothing
    hook = register_module_parameter_registration_hook(hook_function)
    try:
        yield
    finally:
        hook.remove()


def vocabulary_of(model: Any) -> int:
    """Number of token ids of a transformers model; its tokenizer may have fewer."""
    size: int = model.config.get_text_config(decoder=True).vocab_size
    return size
