"""Sharding of a model over the mesh (FSDP2; HSDP where it has several copies), and its full weights."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from slipstream.learner.parallel.mesh import EXPERT_SHARD, World
from slipstream.learner.parallel.plans import split_experts


def shard(
    model: nn.Module,
    layers: Iterable[nn.Module],
    *,
    in_fp32: Iterable[nn.Module] = (),
    dtype: torch.dtype,
    world: World,
    offload: bool = False,
) -> None:
    """Shards a model over the ranks in place, layer by layer; its parameters may be without data (device "meta").

    Parameters with data must be the same on all ranks. A single rank that computes in fp32 keeps the model as it is:
    FSDP would copy every parameter before each use.

    Args:
        layers: parts of the model that are gathered one after the other.
        in_fp32: parts of these layers that compute in fp32 whatever the dtype, and so do their outputs.
        dtype: of computations and outputs; gradients are reduced in fp32.
        offload: keep shards, their gradients and what the optimizer has of them in the host's memory.
    """
    if world.size == 1 and dtype == torch.float32 and not offload:
        return
    mesh = _shard_mesh(world)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offload_policy = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if offload else OffloadPolicy()
    exact = MixedPrecisionPolicy(torch.float32, torch.float32)
    layers = list(layers)
    frozen = any(not parameter.requires_grad for layer in layers for parameter in layer.parameters())
    freed = not keeps_gathered(world.size, offload=offload, frozen=frozen)
    for part in in_fp32:
        fully_shard(part, mesh=mesh, mp_policy=exact, offload_policy=offload_policy, reshard_after_forward=freed)
    for layer in layers:
        for experts in split_experts(layer):
            _shard_experts(experts, precision, offload_policy, world)
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload_policy, reshard_after_forward=freed)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload_policy)


def keeps_gathered(ranks: int, *, offload: bool, frozen: bool) -> bool:
    """True if layers stay in memory as they compute, from the forward to the backward pass.

    Otherwise a single rank would cast its weights a second time. Frozen ones would be copied instead, and no small part
    of what is held at all.
    """
    return ranks == 1 and not offload and not frozen


def _shard_mesh(world: World) -> DeviceMesh:
    """The axes over which parameters are replicated, if there is one, and sharded: also those of one sequence's parts.

    These see different tokens of the same rows, so their gradients differ too.
    """
    mesh, sharded = world.mesh, "dp_shard"
    if world.sizes.cp > 1:
        sharded = "dp_shard_cp"
        mesh["dp_shard", "cp"]._flatten(sharded)
    return mesh[("dp_replicate", sharded) if world.sizes.dp_replicate > 1 else (sharded,)]


def _shard_experts(experts: nn.Module, precision: MixedPrecisionPolicy, place: OffloadPolicy, world: World) -> None:
    assert world.expert_mesh is not None, "experts are split, but there is no axis for them"
    axes = ("dp_replicate", EXPERT_SHARD) if world.sizes.dp_replicate > 1 else (EXPERT_SHARD,)
    sharded: Any = fully_shard(experts, mesh=world.expert_mesh[axes], mp_policy=precision, offload_policy=place)
    # Their gradient covers the tokens of all ranks that have sent some, not only of those between which it is reduced.
    sharded.set_gradient_divide_factor(float(world.data_size * world.sizes.cp))
    # Gloo can't divide while it reduces. (A single shard's gradient would be divided twice.)
    sharded.set_force_sum_reduction_for_comms(world.device.type == "cpu" and world.expert_mesh[EXPERT_SHARD].size() > 1)


def broadcast_weights(model: nn.Module, world: World) -> None:
    """Gives all ranks rank 0's values of parameters and buffers that have data, on their devices; a collective.

    Tied ones stay tied.
    """
    moved: dict[Tensor, Tensor] = {}
    for holder in model.modules():
        for name, tensor in [*holder.named_parameters(recurse=False), *holder.named_buffers(recurse=False)]:
            if tensor.is_meta or isinstance(tensor, DTensor):
                continue
            if tensor not in moved:
                moved[tensor] = _from_root(tensor, world)
            setattr(holder, name, moved[tensor])


def _from_root(tensor: Tensor, world: World) -> Tensor:
    data = tensor.detach().to(world.device).contiguous()
    if world.size > 1:
        dist.broadcast(data, src=0)
    return nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def allocate(model: nn.Module, device: torch.device) -> None:
    """Gives parameters without data memory on a device, each rank its shard; tied ones stay tied."""
    made: dict[Tensor, nn.Parameter] = {}
    for holder in model.modules():
        for name, parameter in list(holder.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            if parameter not in made:
                empty = torch.empty_like(parameter, device=device)
                made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(holder, name, made[parameter])


def reshard(model: nn.Module) -> None:
    """Frees the full parameters that are left after a forward pass without a backward one.

    Until then they are of the computation's dtype, and an optimizer or a reader of the model would get those.
    """
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def full_weights(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterable[tuple[str, Tensor]]:
    """Name and full tensor of every parameter, one after the other; a collective: all ranks consume it in step.

    Tied parameters come once, under the name of the first.

    Args:
        dtype: in which shards of several ranks travel; other tensors keep theirs, fp32.
    """
    reshard(model)
    for name, parameter in model.named_parameters():
        data = parameter.detach()
        if isinstance(data, DTensor):
            several = data.device_mesh.size() > 1
            shards: Any = data.to(dtype) if several and dtype is not None else data
            data = shards.full_tensor()
        yield name, data
