"""The optimizer AdamW, its learning-rate schedule and one update."""

from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.schema.learner import OptimizerConfig


class DivergedError(SlipstreamError):
    """Training has made a model's outputs or gradients not finite; raised on all ranks."""


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over all parameters that are trained; the learning rate is set before each step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True)


def learning_rate(step: int, *, steps: int, config: OptimizerConfig) -> float:
    """Learning rate of `step` (0-based) of `steps`: linear warm-up from 0, then linear decay to the final fraction."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    left = (steps - step) / max(1, steps - config.warmup_steps)
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * left)


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> Tensor:
    """One optimizer update along the clipped gradient, or none if that is not finite; clears the gradients.

    Returns: norm of all ranks' gradient before clipping; the decision is the same on all ranks.
    """
    norm = _clip_gradients(model, config.clip_norm)
    # One such update would make every weight NaN.
    if norm.isfinite():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def _clip_gradients(model: nn.Module, most: float) -> Tensor:
    """Scales the gradient to a norm of at most `most`; returns its norm before."""
    of_mesh = defaultdict[DeviceMesh | None, list[Tensor]](list)  # torch can't combine tensors on different meshes
    for parameter in model.parameters():
        if parameter.grad is not None:
            of_mesh[getattr(parameter.grad, "device_mesh", None)].append(parameter.grad)
    norms = [nn.utils.get_total_norm(gradients) for gradients in of_mesh.values()]
    full = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack(full))
    factor = (most / (total + 1e-6)).clamp(max=1.0)
    for gradients in of_mesh.values():
        torch._foreach_mul_(gradients, factor)
    return total


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets it in every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
