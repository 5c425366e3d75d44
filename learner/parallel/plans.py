"""Tensor and expert parallelism of a transformers model, by the plans of its class."""

import logging
from typing import Any

import transformers
from torch import nn
from torch.distributed.tensor import DTensor

from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.parallel.mesh import EP, World

# It warns, for each layout, that gathering over two axes takes two collectives.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

DISPATCH = "ep_dispatch_experts"
"""The style of a plan that sends each token to the rank of its expert."""


def parallelise(model: Any, world: World) -> None:
    """Splits matrices of the layers over the axis `tp`, and experts over `ep`; before the weights are loaded.

    Embedding and head stay whole on each rank of `tp`: the scores of actions need the whole vocabulary.

    Args:
        model: of transformers; its parameters are without data.

    Raises: ConfigError when there is no plan for the model.
    """
    if world.sizes.tp == 1 and world.expert_mesh is None:
        return
    try:
        from transformers.distributed.tensor_parallel import apply_expert_parallelism, apply_tensor_parallelism
    except ImportError:
        raise ConfigError(
            f"learner.parallel: tp={world.sizes.tp}, ep={world.sizes.ep} need transformers 5.19 or later, and "
            f"{transformers.__version__} is installed; upgrade it, or set both to 1"
        ) from None
    name = type(model).__name__
    expert_plan = {path: style for path, style in model.ep_plan.items() if ".layers." in f".{path}"}
    if world.sizes.ep > 1 and DISPATCH not in expert_plan.values():
        raise ConfigError(
            f"learner.parallel.ep={world.sizes.ep}: transformers has no plan that sends tokens of {name} to experts on "
            "other ranks; set it to 1"
        )
    if world.sizes.tp > 1:
        plan = {
            path: style
            for path, style in model.tp_plan.items()
            if ".layers." in f".{path}" and not any(f"{path}.".startswith(f"{expert}.") for expert in expert_plan)
        }
        if not plan:
            raise ConfigError(f"learner.parallel.tp={world.sizes.tp}: transformers has no plan for {name}; set it to 1")
        apply_tensor_parallelism(model, world.mesh["tp"], plan)
    if world.expert_mesh is not None:
        # The ranks along `tp` have the same tokens: each sends a part of these.
        same_tokens: Any = world.mesh["tp"] if world.sizes.tp > 1 else None
        apply_expert_parallelism(model, world.expert_mesh[EP], same_tokens, expert_plan)


def split_experts(layer: nn.Module) -> list[nn.Module]:
    """The modules of a layer whose parameters are split over the axis `ep`."""
    return [
        module
        for module in layer.modules()
        if any(
            isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names == (EP,)
            for parameter in module.parameters(recurse=False)
        )
    ]
