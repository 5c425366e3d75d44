"""Context parallelism (Ulysses): each rank has a part of the tokens, and in attention a part of the heads.

Attention needs whole sequences but treats its heads apart. So before it an all-to-all exchanges parts of the tokens for
parts of the heads, and after it back. Everything else in a transformer treats its tokens apart.

Source: Jacobs et al. 2023 (DeepSpeed Ulysses), arXiv 2309.14509.

# C ranks of the axis `cp`, T packed tokens, t = T / C, H heads, h = H / C, D head size
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from slipstream.configs.runtime.errors import ConfigError

Attention = Callable[..., tuple[Tensor, Tensor | None]]
"""Attention function of transformers: states [1, H, T, D] to outputs [1, T, H, D], and the attention weights."""

_ATTRIBUTE = "context_parallel"


@dataclass(frozen=True)
class ContextParallel:
    """This rank on the axis `cp`; its methods are collectives of the axis."""

    rank: int
    size: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "ContextParallel":
        """The axis of a mesh with one axis."""
        return cls(mesh.get_local_rank(), mesh.size(), mesh.get_group())

    def gather(self, values_a: Tensor, *, start: int, total: int) -> Tensor:
        """Scores of all ranks' actions, on each of them, shape [total].

        The ranks must compute the same loss from them. Gradients are those of the sum of the ranks' losses: FSDP, which
        averages over these ranks, gives that of one loss.

        Args:
            values_a: those of this rank.
            start: index of its first action.
        """
        gathered: Tensor = _Gather.apply(values_a, start, total, self)  # type: ignore[no-untyped-call]
        return gathered

    def heads_of_all(self, states_1HtD: Tensor) -> Tensor:
        """This rank's heads of all tokens, [1, h, T, D], from all heads of its tokens."""
        return self._exchange(states_1HtD[0])[None]

    def tokens_of_all(self, states_1ThD: Tensor) -> Tensor:
        """All heads of this rank's tokens, [1, t, H, D], from its heads of all tokens."""
        return self._exchange(states_1ThD[0])[None]

    def _exchange(self, states: Tensor) -> Tensor:
        """Sends the n-th part of the first axis to the n-th rank; joins what is received along the second."""
        received: Tensor = _Exchange.apply(states, self.group)  # type: ignore[no-untyped-call]
        of_ranks: Tensor = received.unflatten(0, (self.size, -1))
        return of_ranks.transpose(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """All-to-all along the first axis: gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(states, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, states.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Exchange.forward(ctx, gradients[0], ctx.group), None


class _Gather(torch.autograd.Function):
    """All ranks' values in one tensor; see `ContextParallel.gather`."""

    @staticmethod
    def forward(ctx: Any, values_a: Tensor, start: int, total: int, context: ContextParallel) -> Tensor:
        ctx.own, ctx.ranks = slice(start, start + values_a.numel()), context.size
        gathered = values_a.new_zeros(total)
        gathered[ctx.own] = values_a
        dist.all_reduce(gathered, group=context.group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.ranks * gradients[0][ctx.own], None, None, None


def split_batches(model: nn.Module, mesh: DeviceMesh) -> None:
    """Has `score_actions` and the critic split each micro-batch of the model over the mesh, which has one axis."""
    setattr(model, _ATTRIBUTE, ContextParallel.of(mesh))


def context_of(model: nn.Module) -> ContextParallel | None:
    """The axis over which the model's micro-batches are split; None if they are not."""
    found: ContextParallel | None = getattr(model, _ATTRIBUTE, None)
    return found


def exchanging(attention: Attention) -> Attention:
    """The attention function, with exchanges around it when it is called with `context`."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *,
        context: ContextParallel | None = None,
        s_aux: Tensor | None = None,
        **given: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if s_aux is not None:  # a sink for each head
            given["s_aux"] = s_aux if context is None else s_aux.chunk(context.size)[context.rank]
        if context is None:
            return attention(module, query, key, value, attention_mask, **given)
        _require_equal_parts(module, query.shape[1], context)
        # Each rank needs the key heads of its query heads; the backward pass adds the copies' gradients up.
        copies = math.lcm(key.shape[1], context.size) // key.shape[1]
        key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))
        out, _ = attention(
            module, *(context.heads_of_all(states) for states in (query, key, value)), attention_mask, **given
        )
        return context.tokens_of_all(out), None

    return attend


def _require_equal_parts(module: nn.Module, heads: int, context: ContextParallel) -> None:
    if heads % context.size:
        raise ConfigError(
            f"learner.parallel.cp={context.size} must divide the {heads} attention heads of each "
            f"{type(module).__name__}: in attention each rank has some of the heads"
        )
