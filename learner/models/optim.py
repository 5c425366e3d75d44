"""Optimizers, their learning-rate schedule and one update."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.configs.schema.learner import OptimizerConfig

MOST_STEPS_SKIPPED = 10
"""Consecutive steps with all updates of a model skipped: more than bad batches explain."""


class DivergedError(SlipstreamError):
    """Training has made a model's outputs or gradients not finite; raised on all ranks."""


@dataclass
class SkippedUpdates:
    """Counts updates that were skipped because a gradient was not finite."""

    updates_per_step: int
    checkpoints: Path
    """Folder of the checkpoints, for the error."""
    count: int = 0
    """Skipped updates of all models."""
    _in_a_row: dict[str, int] = field(default_factory=dict, init=False)
    """Consecutive ones of each model, by the metric of its gradient norm."""

    def observe(self, metric: str, norm: Tensor) -> None:
        """Counts the latest update of a model, whose gradient norm is recorded as `metric`."""
        skipped = int(not norm.isfinite())
        self.count += skipped
        self._in_a_row[metric] = skipped * (self._in_a_row.get(metric, 0) + 1)

    def require_updates(self) -> None:
        """Raises: DivergedError, on all ranks, when a model is not updated any more."""
        for metric, skipped in self._in_a_row.items():
            if skipped >= MOST_STEPS_SKIPPED * self.updates_per_step:
                raise DivergedError(
                    f"the last {skipped} updates were skipped, because {metric} is not finite: lower "
                    "learner.optimizer.lr (of another model, its own) and start again; if it recurs, also move the "
                    f"latest checkpoint in {self.checkpoints} away, and start with --undo-steps: the run "
                    "goes on from the one before"
                )

    @property
    def latest(self) -> bool:
        """True if the last update of a model was skipped."""
        return any(self._in_a_row.values())


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices of the layers, AdamW for embeddings, head, norms and stacked experts.

    One optimizer for checkpoints, with one state: the parts work on their groups of it.

    Source: arXiv 2502.16982, whose scale of the updates lets both share a learning rate.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        matrices = [parameter for name, parameter in trained if parameter.ndim == 2 and "layers" in name.split(".")]
        matrix_set = set(matrices)
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"),
            _adamw([parameter for _, parameter in trained if parameter not in matrix_set], config),
        ]
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # takes no closure
        """One update of all parameters that have gradients."""
        # Not once: loading a state replaces both.
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            part.step()


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The configured optimizer over all parameters that are trained; the learning rate is set before each step.

    Raises: ConfigError when it is not installed.
    """
    match config.name:
        case "adamw":
            return _adamw((parameter for parameter in model.parameters() if parameter.requires_grad), config)
        case "adamw_8bit":
            return _adamw_8bit((parameter for parameter in model.parameters() if parameter.requires_grad), config)
        case "muon":
            return MuonWithAdamW(model, config)


def _adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True)


def _adamw_8bit(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise ConfigError(
            'learner.optimizer.name=adamw_8bit needs torchao: pip install "slipstream[torchao]"'
        ) from None
    optimizer: torch.optim.Optimizer = AdamW8bit(
        parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
    )
    return optimizer


def learning_rate(step: int, *, steps: int, config: OptimizerConfig) -> float:
    """Learning rate of `step` (0-based) of `steps`: linear warm-up from 0, then linear decay to the final fraction."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    left = (steps - step) / max(1, steps - config.warmup_steps)
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * left)


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> Tensor:
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
        if isinstance(group["lr"], Tensor):  # of torchao, whose compiled step would be compiled again for each number
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
