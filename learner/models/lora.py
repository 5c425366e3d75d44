"""Low-rank adapters (LoRA, by peft) of a model: the only parameters that are trained, saved and published.

# R rank, I inputs and O outputs of a linear layer, whose weight becomes W_OI + scaling * B_OR A_RI
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.model import LoraConfig
from slipstream.learner.parallel.fsdp import full_weights, reshard
from slipstream.models.adapters import adapter_tensor, require_peft

_NAME = "default"
"""peft's name of the only adapter of a layer."""
_BASE = ".base_layer."
"""Part of the name of a layer's own weight, where the layer has an adapter."""


def add_adapters(model: nn.Module, decoder: Any, lora: LoraConfig, *, dtype: torch.dtype) -> None:
    """Freezes a model and adds adapters to linear layers of its decoder, before it is sharded.

    `init_adapters` draws their values, once these have memory. They are fp32 master weights; frozen weights are kept in
    `dtype`, that of computations.

    Raises: ConfigError when peft is missing, or a target is no linear layer.
    """
    require_peft()
    import peft

    targets = target_names(model, decoder, lora)
    model.requires_grad_(False)
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets)
    # Not `get_peft_model`, whose wrapper would hide the model's class and methods.
    peft.inject_adapter_in_model(config, decoder)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else dtype)


def target_names(model: nn.Module, decoder: Any, lora: LoraConfig) -> list[str]:
    """Names of the linear layers that get adapters. Raises: ConfigError when a target is no linear layer."""
    linear = {name.rpartition(".")[2] for name, module in decoder.layers.named_modules() if type(module) is nn.Linear}
    targets = linear if isinstance(lora.targets, str) else set(lora.targets)
    if strange := sorted(targets - linear):
        raise ConfigError(
            f"model.lora.targets: {type(model).__name__} has no linear layers {', '.join(strange)}; it has "
            f"{', '.join(sorted(linear))}"
        )
    return sorted(targets)


@torch.no_grad()
def init_adapters(model: nn.Module) -> None:
    """Draws A and sets B to 0, so that the policy is the base model; the same values on any number of ranks.

    The seed is that of torch's default generator. Distribution of A: that of `nn.Linear`, as in peft.
    """
    generator = torch.Generator().manual_seed(torch.initial_seed())
    for name, parameter in _adapter_parameters(model):
        whole = torch.zeros(parameter.shape)
        if "lora_A" in name:
            bound = 1 / math.sqrt(parameter.shape[1])
            whole.uniform_(-bound, bound, generator=generator)
        whole = whole.to(parameter.device)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(whole)


def has_adapters(model: nn.Module) -> bool:
    """True if the model's adapters are trained, and its own weights are not."""
    return next(_adapter_parameters(model), None) is not None


def adapter_config(model: nn.Module) -> dict[str, Any]:
    """Content of peft's adapter_config.json for the model's adapters."""
    layers = dict(_adapted_layers(model))
    layer: Any = next(iter(layers.values()))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": layer.r[_NAME],
        "lora_alpha": layer.lora_alpha[_NAME],
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


class AdapterStateDict:
    """The adapters of a model as peft saves them.

    Attributes:
        tensors: shape and dtype of each tensor, by name, in the order of `gather`; they have no data.
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype) -> None:
        """The tensors are saved as `dtype`."""
        self._model = model
        self.tensors = {
            name: torch.empty(parameter.shape, dtype=dtype, device="meta")
            for name, parameter in _adapter_parameters(model)
        }

    def gather(self) -> Iterable[tuple[str, Tensor]]:
        """Name and full fp32 tensor; a collective: all ranks must consume it in step."""
        reshard(self._model)
        for name, parameter in _adapter_parameters(self._model):
            data = parameter.detach()
            yield name, data.full_tensor() if isinstance(data, DTensor) else data


def merged_weights(model: nn.Module, *, dtype: torch.dtype) -> Iterable[tuple[str, Tensor]]:
    """As `full_weights`, with the adapters added to the weights that they belong to; a collective."""
    adapted = {f"{name}{_BASE}weight": layer for name, layer in _adapted_layers(model)}
    for name, weights in full_weights(model, dtype=dtype):
        base = base_name(name)
        if base is not None:
            yield base, weights + _change(adapted[name]) if name in adapted else weights


def base_name(parameter: str) -> str | None:
    """Name of a parameter in the model without adapters; None for a parameter of an adapter."""
    return parameter.replace(_BASE, ".") if adapter_tensor(parameter) is None else None


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context in which the model computes as its base; for passes without gradients."""
    layers: list[Any] = [layer for _, layer in _adapted_layers(model)]
    # Not by `enable_adapters`, which also changes what is trained.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The adapters' parameters, under the names by which peft saves them."""
    for name, parameter in model.named_parameters():
        saved_as = adapter_tensor(name)
        if saved_as is not None:
            yield saved_as, parameter


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of each layer that has an adapter."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))


def _change(layer: Any) -> Tensor:
    """The change of a layer's weight by its adapter, fp32, shape [O, I]; a collective."""
    b_OR, a_RI = (
        weight.full_tensor() if isinstance(weight, DTensor) else weight
        for weight in (layer.lora_B[_NAME].weight.detach(), layer.lora_A[_NAME].weight.detach())
    )
    change_OI: Tensor = layer.scaling[_NAME] * (b_OR @ a_RI)
    return change_OI
