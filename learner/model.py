"""The policy: a transformers model, sharded layer by layer (FSDP2)."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from slipstream.configs.schema import RunConfig
from slipstream.learner import attention
from slipstream.learner.distributed import World


def load_model(config: RunConfig, path: Path, world: World) -> nn.Module:
    """The model of `path`, fp32 master weights sharded over all ranks, computing in `model.dtype`."""
    attention.register()
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=config.learner.attention
    )
    if config.learner.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    shard(model, model.model.layers, config, world)
    model.train()
    sharded: nn.Module = model
    return sharded


def load_reference(config: RunConfig, policy: Path, world: World) -> nn.Module | None:
    """The frozen model that the KL penalty looks at, sharded like the policy; None if there is no penalty."""
    if config.learner.kl is None:
        return None
    model = load_model(config, config.learner.kl.reference or policy, world)
    return model.requires_grad_(False)


def shard(model: nn.Module, layers: Iterable[nn.Module], config: RunConfig, world: World) -> None:
    """Shards a model over all ranks, layer by layer; it computes in `model.dtype` and answers in fp32."""
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.model.dtype), reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    for layer in layers:
        fully_shard(layer, mesh=world.mesh, mp_policy=precision)
    fully_shard(model, mesh=world.mesh, mp_policy=precision)


def full_weights(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Name and full tensor of every parameter; a collective: all ranks must consume it in step.

    Tied parameters come once, under the name of the first.
    """
    for name, parameter in model.named_parameters():
        data = parameter.detach()
        yield name, data.full_tensor() if isinstance(data, DTensor) else data
