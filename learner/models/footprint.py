"""Sizes of a model and of its activations, from its configuration alone: nothing is allocated or computed."""

import copy
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM

from slipstream.learner.models import attention
from slipstream.learner.models.layers import Checkpointing, backbone_of, checkpoint_activations, decoder_of
from slipstream.learner.models.vision import auto_class

SIMULATED_PERIODS = (1, 2)
"""Depths of the simulated models, in periods of different layers; memory grows by the same with each."""
EXPERT_DIMENSIONS = 3
"""Dimensions of a tensor of stacked experts."""


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters."""

    layers: int
    """Number of layers."""
    dense: int
    """Parameters of all layers, without experts."""
    experts: int
    """Parameters of the experts of all layers."""
    largest_dense: int
    """Parameters of the largest layer, without experts."""
    largest_experts: int
    """Parameters of the experts of the largest layer."""
    matrices: int
    """Parameters in two-dimensional weights of layers."""
    root: int
    """Outside of layers: embedding, norm and head."""
    head: int
    """Parameters of the head, the embedding itself where they are tied."""
    rows: int
    """Sum of both dimensions of all matrices in layers: an adapter of rank 1 has so many."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts + self.root


def model_size(config: Any) -> ModelSize:
    """The size of the causal language model of a transformers config."""
    with torch.device("meta"):
        model: Any = auto_class(config.model_type).from_config(config)
    dense, experts = [], []
    rows = matrices = 0
    for layer in decoder_of(model).layers:
        shapes = [parameter.shape for parameter in layer.parameters()]
        stacked = sum(shape.numel() for shape in shapes if len(shape) == EXPERT_DIMENSIONS)
        dense.append(sum(shape.numel() for shape in shapes) - stacked)
        experts.append(stacked)
        matrices += sum(shape.numel() for shape in shapes if len(shape) == 2)
        rows += sum(sum(shape) for shape in shapes if len(shape) == 2)
    total = sum(parameter.numel() for parameter in model.parameters())
    return ModelSize(
        layers=len(dense),
        dense=sum(dense),
        experts=sum(experts),
        largest_dense=max(dense),
        largest_experts=max(experts),
        matrices=matrices,
        root=total - sum(dense) - sum(experts),
        head=model.get_output_embeddings().weight.numel(),
        rows=rows,
    )


class ActivationBytes(NamedTuple):
    """Memory of the backbone's activations and their gradients."""

    peak: int
    """In one forward and backward pass."""
    kept: int
    """After the forward pass, when the head is computed."""


def activation_bytes(
    config: Any, *, tokens: int, dtype: torch.dtype, checkpointing: Checkpointing, tensor_parallel: int = 1
) -> ActivationBytes:
    """Memory of the backbone's activations in one forward and backward pass, without the head.

    Simulated with the learner's own attention for one sequence of `tokens`, at two depths, and extended to all layers.

    Args:
        config: of transformers.
        tensor_parallel: ranks that share the heads and the width of each layer.
    """
    attention.register()
    kinds = getattr(config, "layer_types", None) or [""]
    period = next(n for n in range(1, len(kinds) + 1) if kinds == (kinds[:n] * len(kinds))[: len(kinds)])
    layers: int = config.num_hidden_layers
    if layers <= period:  # as where no period repeats
        return _simulate(_rank_part(config, layers, tensor_parallel), tokens, dtype, checkpointing)
    shallow, deep = (
        _simulate(_rank_part(config, period * depth, tensor_parallel), tokens, dtype, checkpointing)
        for depth in SIMULATED_PERIODS
    )
    periods = layers / period
    return ActivationBytes(*(round(one + (two - one) * (periods - 1)) for one, two in zip(shallow, deep, strict=True)))


def _rank_part(config: Any, layers: int, tensor_parallel: int) -> Any:
    """The config of a model of so many layers, of which a tensor-parallel rank has its part of heads and width."""
    part = copy.deepcopy(config)
    part.num_hidden_layers = layers
    kinds = getattr(part, "layer_types", None) or []
    if kinds and len(kinds) != layers:  # some configs compute them
        part.layer_types = (kinds * ceil(layers / len(kinds)))[:layers]
    if getattr(part, "head_dim", None) is None:
        part.head_dim = part.hidden_size // part.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size"):
        if isinstance(whole := getattr(part, name, None), int):
            setattr(part, name, max(1, whole // tensor_parallel))
    return part


def _simulate(config: Any, tokens: int, dtype: torch.dtype, checkpointing: Checkpointing) -> ActivationBytes:
    with FakeTensorMode():
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME).eval()
        checkpoint_activations(model, decoder_of(model).layers, checkpointing)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        states_1ND = torch.zeros(1, tokens, config.hidden_size, dtype=dtype).requires_grad_()
        positions_1N = torch.arange(tokens)[None]
        with _LiveBytes(model.parameters()) as live:
            found = backbone_of(model)(
                inputs_embeds=states_1ND, position_ids=positions_1N, use_cache=False, segment_lengths=(tokens,)
            ).last_hidden_state
            kept = live.now
            found.backward(torch.zeros_like(found))
    return ActivationBytes(live.peak, kept)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, while they live."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        """`weights` do not count."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch lacks types here
        self.peak = 0
        self.now = 0
        self._known = weakref.WeakSet[Any](weight.untyped_storage() for weight in weights)

    def __torch_dispatch__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return output

    def _count(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.now -= size
