"""Checkpoints (torch.distributed.checkpoint) and the Hugging Face export; all functions are collectives."""

import copy
import json
import shutil
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from slipstream.configs.paths import checkpoint_steps
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.files import apply_default_mode, fsync_path, write_atomically
from slipstream.configs.runtime.logging import get_log
from slipstream.learner.models.hf_state_dict import SavedForm
from slipstream.learner.parallel.mesh import World

log = get_log("learner.checkpoint")

ModelsAndOptimizers = Mapping[str, tuple[nn.Module, Optimizer]]
"""Models and their optimizers, by name."""

TRAIN_STATE = "progress.json"
INITIAL_WEIGHTS = (
    "*.safetensors*", "*.bin*", "*.gguf", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx*", ".git",
)  # fmt: skip
"""Files of weights in a model's folder, in any format; in `.git` a clone has a copy."""


class CheckpointError(SlipstreamError):
    """A checkpoint, or the trained model, can't be written or read."""


@dataclass(frozen=True)
class TrainState:
    """The state of a training beside models and optimizers."""

    step: int = 0
    """Steps done."""
    version: int = 0
    """Latest policy version that was published."""
    kl_coefficient: float | None = None
    """Of an adaptive KL penalty."""
    throttle: dict[str, float] = field(default_factory=dict)
    """Its `state()`."""


def open_checkpoints(folder: Path, world: World, *, keep: int) -> None:
    """Creates the folder, and removes incomplete checkpoints of earlier starts and those beyond `keep`.

    Raises: CheckpointError, on all ranks, when it can't be made or not all of them see it.
    """
    # A new name: a network file system may have cached that another one does not exist.
    marker, problem = folder / f".shared-{uuid.uuid4().hex}", None
    if world.is_root:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for unused in (*folder.glob("step-*.partial"), *_outdated(folder, keep)):
                _remove(unused)
            marker.touch()
        except OSError as error:
            problem = f"{folder} can't be used for checkpoints: {error.strerror}; see run.dir"
    name, problem = world.from_root((marker.name, problem))
    if problem is not None:
        raise CheckpointError(problem)
    seen = world.gather((socket.gethostname(), (folder / name).exists()))
    if world.is_root:
        marker.unlink(missing_ok=True)
    for rank, (host, sees) in enumerate(seen):
        if not sees:
            raise CheckpointError(
                f"learner rank {rank} on {host} does not see the {folder} of rank 0 on {seen[0][0]}: set run.dir to "
                "storage that all hosts of the learner share"
            )


def save_checkpoint(folder: Path, trained: ModelsAndOptimizers, state: TrainState, world: World, *, keep: int) -> None:
    """Writes `folder/step-<step>`; the name appears only when it is complete, also after a power loss.

    Older ones beyond `keep` are removed.

    Raises: CheckpointError, on all ranks, when it can't be written; no partial one is left.
    """
    target = folder / _name(state.step)
    partial = folder / f"{target.name}.partial"
    problem = None
    try:
        dcp.save(_state(trained), checkpoint_id=partial)
        if world.is_root:
            write_atomically(partial / TRAIN_STATE, [json.dumps(asdict(state)).encode()])
            _remove(target)
            partial.rename(target)
            fsync_path(folder)
    except (CheckpointException, OSError) as error:
        problem = f"{_cause(error)}, with {shutil.disk_usage(folder).free / 1e6:,.1f} MB free there"
    problem = world.from_root(problem)
    if problem is not None:
        if world.is_root:
            _remove(partial)
        raise CheckpointError(
            f"the checkpoint of step {state.step} can't be written to {folder}: {problem}; make room or lower "
            f"learner.checkpoint.keep={keep}, and start again: the run goes on from the checkpoint before"
        )
    if world.is_root:
        for old in _outdated(folder, keep):
            _remove(old)


def load_checkpoint(folder: Path, trained: ModelsAndOptimizers, world: World) -> TrainState | None:
    """Restores the latest checkpoint that rank 0 sees into models and optimizers; None if there is none.

    The optimizers keep their present settings, not those of the checkpoint.

    Raises: CheckpointError when it is damaged, or of other models.
    """
    steps = world.from_root(checkpoint_steps(folder))
    if not steps:
        return None
    latest = folder / _name(steps[-1])
    state = _state(trained)
    try:
        dcp.load(state, checkpoint_id=latest)
        found = TrainState(**json.loads((latest / TRAIN_STATE).read_text(encoding="utf-8")))
    except (
        CheckpointException,
        OSError,
        ValueError,
        TypeError,
    ) as error:  # the last two: of TRAIN_STATE
        raise CheckpointError(
            f"{latest} can't be loaded: {_cause(error)}; train with the model and learner.critic that it was saved "
            "with; if it is damaged, move it away, and the run goes on from the one before"
        ) from error
    for name, (model, optimizer) in trained.items():
        configured = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
        set_state_dict(
            model, optimizer, model_state_dict=state[name]["model"], optim_state_dict=state[name]["optimizer"]
        )
        for group, settings in zip(optimizer.param_groups, configured, strict=True):
            group.update(settings)
    return found


def _state(trained: ModelsAndOptimizers) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (model, optimizer) in trained.items():
        fresh = not optimizer.state
        found[name] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        if fresh:  # get_state_dict fills it by a step without effect; counted, that would bias the first update
            for values in optimizer.state.values():
                values["step"].zero_()
    return found


def export_model(source: Path, target: Path, model: nn.Module, world: World, *, dtype: torch.dtype) -> None:
    """Writes a Hugging Face folder: the weights as `dtype`, with config and tokenizer of `source`.

    Raises: CheckpointError when it can't be written.
    """
    form = SavedForm(model, dtype=dtype)
    weights = {
        name: tensor.to("cpu", form.tensors[name].dtype, copy=True, memory_format=torch.contiguous_format)
        for name, tensor in form.gather()
        if world.is_root
    }
    if world.is_root:
        try:
            _write_model(source, target, model, weights, dtype)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the trained model can't be written to {target}: {error}; make room, and start again: the run goes on "
                "from its last checkpoint"
            ) from error


def _write_model(
    source: Path, target: Path, model: nn.Module, weights: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    """Raises: OSError, SafetensorError."""
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=_all_but_weights(target))
    described: Any = copy.deepcopy(model.config)
    described.dtype = dtype
    described.save_pretrained(target)
    save_torch_state_dict(weights, target)
    for file in target.glob("*.safetensors"):
        apply_default_mode(file)
    for written in (*target.rglob("*"), target):
        fsync_path(written)


def _all_but_weights(target: Path) -> Callable[[str, list[str]], set[str]]:
    """Ignore function for `shutil.copytree`: weights, and `target` itself if it lies in the model's folder."""
    weights = shutil.ignore_patterns(*INITIAL_WEIGHTS)
    inside = {target.resolve(), *target.resolve().parents}

    def ignored(folder: str, names: list[str]) -> set[str]:
        return weights(folder, names) | {name for name in names if Path(folder, name).resolve() in inside}

    return ignored


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _outdated(folder: Path, keep: int) -> list[Path]:
    return [folder / _name(step) for step in checkpoint_steps(folder)[:-keep]]


def _remove(folder: Path) -> None:
    """Deletes a checkpoint if it exists; failure is logged: on NFS another process may be reading it."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("old checkpoint not deleted", folder=str(folder), reason=error.strerror)


def _cause(error: CheckpointException | OSError | ValueError | TypeError) -> str:
    """Cause of a failure, in a line. Raises: exceptions such as KeyboardInterrupt, which torch wraps too."""
    if not isinstance(error, CheckpointException):
        return str(error)
    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    for failure in failures.values():
        if not isinstance(failure, Exception):
            raise failure
    return "; ".join(f"{str(failure) or type(failure).__name__} (rank {rank})" for rank, failure in failures.items())
