"""Rank 0 alone loads a model's weights; the others get them layer by layer, as each layer is sharded."""

from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slipstream.learner.distributed import World


def replicate(module: nn.Module, world: World) -> None:
    """Gives all ranks rank 0's parameters and buffers, on their devices, except what is sharded; a collective.

    On the other ranks the tensors may be without data (of the device "meta"). Tied ones stay tied.
    """
    if world.size == 1:
        return
    given: dict[Tensor, Tensor] = {}
    for holder in module.modules():
        own = chain(holder.named_parameters(recurse=False), holder.named_buffers(recurse=False))
        for name, tensor in list(own):
            if isinstance(tensor, DTensor):
                continue
            if tensor not in given:
                given[tensor] = _of_rank_0(tensor, world)
            setattr(holder, name, given[tensor])


def _of_rank_0(tensor: Tensor, world: World) -> Tensor:
    if world.is_root:
        data = tensor.detach().to(world.device).contiguous()
    else:
        data = torch.empty_like(tensor, device=world.device, memory_format=torch.contiguous_format)
    dist.broadcast(data, src=0)
    return nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
