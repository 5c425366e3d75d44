"""Checkpoints (torch.distributed.checkpoint) and the Hugging Face export; all functions are collectives."""

import copy
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from slipstream.buffer.wire.tensor_file import write_whole
from slipstream.learner.distributed import World
from slipstream.learner.model import full_weights

Trained = Mapping[str, tuple[nn.Module, Optimizer]]
"""Models and their optimizers, by name."""

PROGRESS = "progress.json"


@dataclass(frozen=True)
class Progress:
    """How far training has come."""

    step: int = 0
    """Steps done."""
    version: int = 0
    """Latest policy version that was published."""
    tokens_trained: int = 0
    """Input tokens trained on."""
    kl_coefficient: float | None = None
    """Where an adaptive KL penalty stands."""
    throttle: dict[str, float] = field(default_factory=dict)
    """Where the throttle stands."""


def save_checkpoint(folder: Path, trained: Trained, progress: Progress, world: World, *, keep: int) -> None:
    """Writes `folder/step-<step>`; it has that name only once it is complete, also after a power loss.

    Older ones beyond `keep` are removed.
    """
    target = folder / _name(progress.step)
    partial = folder / f"{target.name}.partial"
    if world.is_root:
        shutil.rmtree(partial, ignore_errors=True)
    world.barrier()
    dcp.save(_state(trained), checkpoint_id=partial)
    if world.is_root:
        write_whole(partial / PROGRESS, [json.dumps(asdict(progress)).encode()])
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        _sync(folder)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(folder / _name(old))
    world.barrier()


def load_checkpoint(folder: Path, trained: Trained) -> Progress | None:
    """Restores the latest checkpoint into models and optimizers; None if there is none.

    The optimizers' settings stay as they are, whatever they were when it was saved.
    """
    steps = checkpoints(folder)
    if not steps:
        return None
    latest = folder / _name(steps[-1])
    state = _state(trained)
    dcp.load(state, checkpoint_id=latest)
    for name, (model, optimizer) in trained.items():
        configured = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
        set_state_dict(
            model, optimizer, model_state_dict=state[name]["model"], optim_state_dict=state[name]["optimizer"]
        )
        for group, settings in zip(optimizer.param_groups, configured, strict=True):
            group.update(settings)
    return Progress(**json.loads((latest / PROGRESS).read_text(encoding="utf-8")))


def _state(trained: Trained) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (model, optimizer) in trained.items():
        fresh = not optimizer.state
        found[name] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        if fresh:  # it was filled by a step that changed no weight; counted, it would bias the first real one
            for state in optimizer.state.values():
                state["step"].zero_()
    return found


def checkpoints(folder: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    matches = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in matches if match)


def export_model(source: Path, target: Path, model: nn.Module, world: World, *, dtype: torch.dtype) -> None:
    """Writes a Hugging Face folder: the present weights as `dtype`, with config and tokenizer of `source`."""
    weights = {name: tensor.to("cpu", dtype, copy=True) for name, tensor in full_weights(model) if world.is_root}
    buffers = _persistent_buffers(model)  # on all ranks: looking for them, FSDP2 gives back what it has gathered
    if world.is_root:
        shutil.copytree(
            source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin", "*.gguf")
        )
        described: Any = copy.deepcopy(model.config)
        described.dtype = dtype
        described.save_pretrained(target)
        save_torch_state_dict(weights | buffers, target)


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """What of a model is no parameter and yet saved, such as the bias by which experts are chosen; as it is."""
    saved = model.state_dict().keys()
    return {name: buffer.cpu() for name, buffer in model.named_buffers() if name in saved}


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _sync(folder: Path) -> None:
    """Returns once a power loss leaves the folder's names as they are."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
