"""Layers of a transformers model: their place in it, activation checkpointing, compilation."""

from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from slipstream.configs.runtime.errors import ConfigError

Checkpointing = Literal["none", "selective", "full"]

_OF_EXPERTS = frozenset({torch.ops.aten.bmm.default, torch.ops.aten._grouped_mm.default})
_PRODUCTS = _OF_EXPERTS | {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def backbone_of(model: Any) -> Any:
    """A transformers model without its language head."""
    return getattr(model, "model", model.base_model)


def decoder_of(model: Any) -> Any:
    """The part of a transformers model that has its `layers`. Raises: ConfigError if there is none."""
    decoder = backbone_of(model).get_decoder()
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise ConfigError(f"{type(model).__name__} can't be trained by this learner: its decoder has no list `layers`")
    return decoder


def checkpoint_activations(model: Any, layers: Iterable[nn.Module], mode: Checkpointing) -> None:
    """Recomputes the layers' activations in the backward pass; gradients stay the same.

    Args:
        model: of transformers; it stays in evaluation mode.
        mode: `full` keeps only the input of each layer, `selective` also the results of attention and of every second
            matrix product; not of experts with a bias, which transformers adds in place.
    """
    if mode == "none":
        return
    settings: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        biased = any(getattr(part, "has_bias", False) for part in model.modules())
        settings["context_fn"] = partial(_selective_contexts, _PRODUCTS - _OF_EXPERTS if biased else _PRODUCTS)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    for layer in layers:
        layer.training = True  # transformers checkpoints in no other mode; its submodules stay in evaluation mode


def _selective_contexts(keepable: Set[Any]) -> Any:
    """Contexts of one layer's forward pass and of its recomputation."""
    products = {False: 0, True: 0}

    def policy(context: Any, operator: Callable[..., Any], *_: Any, **__: Any) -> CheckpointPolicy:
        if operator in keepable:
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 0
        else:
            kept = any(part in str(operator) for part in ("attention", "attn"))
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compiles each layer at its first use, for micro-batches of any size."""
    for layer in layers:
        layer.compile(dynamic=True)
