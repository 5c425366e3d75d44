"""The trained model as a Hugging Face folder."""

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from slipstream.configs.runtime.files import apply_default_mode, fsync_path, write_atomically
from slipstream.learner.checkpoint import CheckpointError
from slipstream.learner.models.hf_state_dict import HfStateDict
from slipstream.learner.models.lora import AdapterStateDict, adapter_config
from slipstream.learner.parallel.mesh import World

WEIGHT_INDEX = "model.safetensors.index.json"
EXPORTED_BYTES = 5 * 10**9
"""Largest size of one of several files of exported weights."""
INITIAL_WEIGHTS = (
    "*.safetensors*", "*.bin*", "*.gguf", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx*", ".git",
)  # fmt: skip
"""Files of weights in a model's folder, in any format; in `.git` a clone has a copy."""


def export_model(
    source: Path, target: Path, model: nn.Module, world: World, *, dtype: torch.dtype, adapter: bool = False
) -> None:
    """Writes a Hugging Face folder: the weights as `dtype`, with config and tokenizer of `source`; a collective.

    Adapters are merged into the weights or, with `adapter`, written alone, in peft's format. Rank 0 holds the tensors
    of one file at a time.

    Raises: CheckpointError, on all ranks, when it can't be written.
    """
    form: AdapterStateDict | HfStateDict = (AdapterStateDict if adapter else HfStateDict)(model, dtype=dtype)
    files = ExportedFiles(target, form.tensors, name="adapter_model" if adapter else "model")
    start = (
        partial(_start_adapter, source, target, model)
        if adapter
        else partial(_start_export, source, target, model, dtype)
    )
    problem = _failure(start) if world.is_root else None
    for name, tensor in form.gather():  # to the end also after a failure: the other ranks gather too
        if world.is_root and problem is None:
            problem = _failure(partial(files.add, name, tensor))
    if world.is_root and problem is None:
        problem = _failure(files.finish)
    problem = world.from_root(problem)
    if problem is not None:
        raise CheckpointError(
            f"the trained model can't be written to {target}: {problem}; make room, and start again: the run goes on "
            "from its last checkpoint"
        )


class ExportedFiles:
    """The files of weights in a folder, each written when it has all its tensors."""

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor], *, name: str) -> None:
        """Divides the tensors among files of at most EXPORTED_BYTES.

        Args:
            folder: of the files; it exists before the first one is full.
            tensors: all that will be added, of their shapes and dtypes, without data.
            name: first part of the files' names.
        """
        self._folder = folder
        self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        # Not the tensors themselves, which are parts of larger ones: those would be counted.
        sizes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
        self._split = split_torch_state_dict_into_shards(
            sizes, filename_pattern=f"{name}{{suffix}}.safetensors", max_shard_size=EXPORTED_BYTES
        )
        self._begun: dict[str, dict[str, torch.Tensor]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor. Raises: OSError, SafetensorError."""
        file = self._split.tensor_to_filename[name]
        tensors = self._begun.setdefault(file, {})
        tensors[name] = tensor.to("cpu", self._dtypes[name], copy=True, memory_format=torch.contiguous_format)
        if len(tensors) == len(self._split.filename_to_tensors[file]):
            save_file(self._begun.pop(file), self._folder / file, metadata={"format": "pt"})
            apply_default_mode(self._folder / file)

    def finish(self) -> None:
        """Writes the index of several files. Raises: OSError."""
        if self._split.is_sharded:
            index = {"metadata": self._split.metadata, "weight_map": self._split.tensor_to_filename}
            write_atomically(self._folder / WEIGHT_INDEX, [json.dumps(index, indent=2, sort_keys=True).encode()])
        for written in (*self._folder.rglob("*"), self._folder):
            fsync_path(written)


def _failure(call: Callable[[], None]) -> str | None:
    """The message of a call's OSError or SafetensorError; None if it succeeds."""
    try:
        call()
    except (OSError, SafetensorError) as error:
        return str(error)
    return None


def _start_export(source: Path, target: Path, model: nn.Module, dtype: torch.dtype) -> None:
    """Writes everything but the weights. Raises: OSError."""
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=_all_but_weights(target))
    for earlier in target.glob("model*.safetensors*"):
        earlier.unlink()
    described: Any = copy.deepcopy(model.config)
    described.dtype = dtype
    described.save_pretrained(target)


def _start_adapter(source: Path, target: Path, model: nn.Module) -> None:
    """Writes the adapter's configuration. Raises: OSError."""
    target.mkdir(parents=True, exist_ok=True)
    config = adapter_config(model) | {"base_model_name_or_path": str(source)}
    write_atomically(target / "adapter_config.json", [json.dumps(config, indent=2).encode()])


def _all_but_weights(target: Path) -> Callable[[str, list[str]], set[str]]:
    """Ignore function for `shutil.copytree`: weights, and `target` itself if it lies in the model's folder."""
    weights = shutil.ignore_patterns(*INITIAL_WEIGHTS)
    inside = {target.resolve(), *target.resolve().parents}

    def ignored(folder: str, names: list[str]) -> set[str]:
        return weights(folder, names) | {name for name in names if Path(folder, name).resolve() in inside}

    return ignored
