"""Checkpoints (torch.distributed.checkpoint) and the Hugging Face export; all functions are collectives."""

import copy
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from slipstream.learner.distributed import World
from slipstream.learner.model import full_weights


@dataclass(frozen=True)
class Progress:
    """How far training has come."""

    step: int = 0
    """Steps done."""
    version: int = 0
    """Latest policy version that was published."""
    tokens_trained: int = 0
    """Input tokens trained on."""


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: Optimizer, progress: Progress, world: World, *, keep: int
) -> None:
    """Writes `folder/step-<step>`; it has that name only once it is complete. Older ones beyond `keep` are removed."""
    target = folder / _name(progress.step)
    partial = folder / f"{target.name}.partial"
    if world.is_root:
        shutil.rmtree(partial, ignore_errors=True)
    _barrier(world)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "progress": vars(progress)}
    dcp.save(state, checkpoint_id=partial)
    if world.is_root:
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(folder / _name(old))
    _barrier(world)


def load_checkpoint(folder: Path, model: nn.Module, optimizer: Optimizer) -> Progress | None:
    """Restores the latest checkpoint into model and optimizer; None if there is none."""
    steps = checkpoints(folder)
    if not steps:
        return None
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {
        "model": model_state,
        "optimizer": optimizer_state,
        "progress": vars(Progress()),
    }
    dcp.load(state, checkpoint_id=folder / _name(steps[-1]))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return Progress(**state["progress"])


def checkpoints(folder: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    matches = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in matches if match)


def export_model(source: Path, target: Path, model: nn.Module, world: World, *, dtype: torch.dtype) -> None:
    """Writes a Hugging Face folder: the present weights as `dtype`, with config and tokenizer of `source`."""
    weights = {name: tensor.to("cpu", copy=True) for name, tensor in full_weights(model) if world.is_root}
    if not world.is_root:
        return
    shutil.copytree(
        source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin", "*.gguf")
    )
    described: Any = copy.deepcopy(model.config)
    described.dtype = dtype
    described.save_pretrained(target)
    save_torch_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()}, target)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _barrier(world: World) -> None:
    if world.size > 1:
        dist.barrier()
