"""The policy: a transformers model, sharded layer by layer (FSDP2)."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from slipstream.configs.logs import get_log
from slipstream.configs.schema import RunConfig
from slipstream.learner import attention
from slipstream.learner.distributed import World

log = get_log("learner.model")


def load_model(config: RunConfig, path: Path, world: World) -> nn.Module:
    """The model of `path`, fp32 master weights sharded over all ranks, computing in `model.dtype`."""
    model = load_whole(config, path)
    shard(model, model.model.layers, config, world)
    sharded: nn.Module = model
    return sharded


def load_reference(config: RunConfig, policy: Path, world: World) -> nn.Module | None:
    """The frozen model that the KL penalty looks at, sharded like the policy; None if there is no penalty."""
    if config.learner.kl is None:
        return None
    model = load_model(config, config.learner.kl.reference or policy, world)
    return model.requires_grad_(False)


def load_whole(config: RunConfig, path: Path) -> Any:
    """The transformers model of `path`, not sharded, in fp32.

    It is in evaluation mode, in which it has a gradient too, but neither dropout nor noise in the choice of experts:
    the engine samples without them.
    """
    attention.register()
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=config.learner.attention
    ).eval()
    if config.learner.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for layer in model.model.layers:
            layer.training = True  # transformers checkpoints in no other mode; what the layer is made of stays as it is
    dropouts = {name: p for name, p in model.config.to_dict().items() if "drop" in name and isinstance(p, float) and p}
    if dropouts:
        log.info("dropout is off, as in the engine", model=str(path), **dropouts)
    return model


def shard(model: nn.Module, layers: Iterable[nn.Module], config: RunConfig, world: World) -> None:
    """Shards a model over all ranks, layer by layer; it computes in `model.dtype` and answers in fp32."""
    layer_precision = MixedPrecisionPolicy(param_dtype=getattr(torch, config.model.dtype), reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=world.mesh, mp_policy=layer_precision)
    # Not of the layers: what follows the last one computes in `model.dtype` too.
    answer_precision = replace(layer_precision, output_dtype=torch.float32)
    fully_shard(model, mesh=world.mesh, mp_policy=answer_precision)


def full_weights(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Name and full fp32 tensor of every parameter; a collective: all ranks must consume it in step.

    Tied parameters come once, under the name of the first.
    """
    if isinstance(model, FSDPModule):
        # After a pass without a backward one the root's parameters are those it computed with: of `model.dtype`.
        model.reshard()
    for name, parameter in model.named_parameters():
        data = parameter.detach()
        yield name, data.full_tensor() if isinstance(data, DTensor) else data
