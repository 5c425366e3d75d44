"""Sharding of a model over the mesh's axis `dp_shard` (FSDP2), and its full weights."""

from collections.abc import Iterable
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from slipstream.learner.parallel.mesh import World


def shard(model: nn.Module, layers: Iterable[nn.Module], *, dtype: torch.dtype, world: World) -> None:
    """Shards rank 0's fp32 model over the ranks in place, layer by layer; a collective.

    On other ranks its tensors may be without data (of the device "meta"). A single rank that computes in fp32 keeps the
    model as it is: FSDP would copy every parameter before each use.

    Args:
        layers: parts of the model that are gathered one after the other.
        dtype: of computations and outputs; gradients are reduced in fp32.
    """
    if world.size == 1 and dtype == torch.float32:
        model.to(world.device)
        return
    mesh = world.mesh["dp_shard"]
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in layers:
        _replicate(layer, world)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    _replicate(model, world)
    fully_shard(model, mesh=mesh, mp_policy=precision)


def reshard(model: nn.Module) -> None:
    """Frees the full parameters that are left after a forward pass without a backward one.

    Until then they are of the computation's dtype, and an optimizer or a reader of the model would get those.
    """
    if isinstance(model, FSDPModule):
        model.reshard()


def full_weights(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Name and full fp32 tensor of every parameter; a collective: all ranks must consume it in step.

    Tied parameters come once, under the name of the first.
    """
    reshard(model)
    for name, parameter in model.named_parameters():
        data = parameter.detach()
        yield name, data.full_tensor() if isinstance(data, DTensor) else data


def _replicate(module: nn.Module, world: World) -> None:
    """Gives all ranks rank 0's parameters and buffers, on their devices, except sharded ones. Tied ones stay tied."""
    if world.size == 1:
        return
    replicas: dict[Tensor, Tensor] = {}
    for holder in module.modules():
        own = chain(holder.named_parameters(recurse=False), holder.named_buffers(recurse=False))
        for name, tensor in list(own):
            if isinstance(tensor, DTensor):
                continue
            if tensor not in replicas:
                replicas[tensor] = _from_root(tensor, world)
            setattr(holder, name, replicas[tensor])


def _from_root(tensor: Tensor, world: World) -> Tensor:
    if world.is_root:
        data = tensor.detach().to(world.device).contiguous()
    else:
        data = torch.empty_like(tensor, device=world.device, memory_format=torch.contiguous_format)
    dist.broadcast(data, src=0)
    return nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
