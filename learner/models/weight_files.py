"""Weights of a model from its files, read by every rank for its own shards.

In memory some models have tensors of other names and shapes than in their files: mostly, transformers stacks experts.
"""

import json
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.distributed.sharding_utils import DtensorShardOperation
from transformers.modeling_utils import load_state_dict

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log

log = get_log("learner.model")

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
NAMED_AT_MOST = 5


class WeightFiles:
    """The tensors of a model's folder; nothing is read before it is sliced."""

    def __init__(self, folder: Path) -> None:
        """Raises: ConfigError for a folder without weights, or a damaged file; whatever the reader of *.bin raises."""
        self._tensors: dict[str, Any] = {}
        for file in _files(folder):
            if file.suffix == ".safetensors":
                opened = _open(file)
                self._tensors |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no dict)
            else:
                # Mapped into memory too, unless it was written by a torch before 1.6.
                self._tensors |= load_state_dict(file)

    def names(self) -> list[str]:
        """Names of all tensors, layers and experts in the order of their numbers."""
        return sorted(self._tensors, key=dot_natural_key)

    def read(self, name: str) -> Tensor:
        """A whole tensor, in its file's dtype; without a copy."""
        tensor: Tensor = self._tensors[name][...]
        return tensor

    def sliceable(self, name: str) -> Any:
        """The tensor, of which only what is sliced is read."""
        return self._tensors[name]


def _open(file: Path) -> Any:
    """A file of safetensors, of which only the header is read. Raises: ConfigError."""
    try:
        opened: Any = safe_open(file, framework="pt")  # has no types
    except FileNotFoundError:
        raise ConfigError(f"{file} is missing, which the index of the weights names; copy the model again") from None
    except SafetensorError as error:
        raise ConfigError(f"{file} is damaged or cut off ({error}); copy the model again") from None
    return opened


def _files(folder: Path) -> list[Path]:
    for name in (SAFETENSORS, PICKLED):
        if (folder / f"{name}.index.json").is_file():
            index = json.loads((folder / f"{name}.index.json").read_text(encoding="utf-8"))
            return [folder / file for file in sorted(set(index["weight_map"].values()))]
        if (folder / name).is_file():
            return [folder / name]
    raise ConfigError(f"{folder} holds neither {SAFETENSORS} nor {PICKLED}, nor an index of their parts")


@dataclass
class WeightLoader:
    """The map from the tensors of files to those of a model, and the loading of each rank's shards.

    It is made before the model is adapted or sharded, and loads afterwards: it knows each tensor by the module that
    holds it, which both keep.
    """

    model: Any
    """A model of transformers without data."""
    path: Path
    """Folder of the files."""
    files: WeightFiles
    _plain: dict[str, str] = field(default_factory=dict, init=False)
    """Name in the files of each tensor that is the same in memory."""
    _converted: dict[str, WeightConverter] = field(default_factory=dict, init=False)
    """Conversions of the others, by the first name in memory."""

    def __post_init__(self) -> None:
        self._holders = {name: _holder(self.model, name) for name in self.model.state_dict()}
        conversions = get_model_conversion_mapping(self.model)
        self._plan(conversions)
        # By these the weights are saved again.
        self.model._weight_conversions = [conversion for conversion in conversions if conversion.was_used()]

    def load(self, trained: nn.Module) -> None:
        """Fills the parts of the model that `trained` has, which are allocated.

        Raises: ConfigError when tensors are missing, or have other shapes.
        """
        modules = {id(module) for module in trained.modules()}
        filled = set[int]()
        for name, saved_as in self._plain.items():
            if id(self._holders[name][0]) in modules:
                filled.add(self._fill(name, self.files.sliceable(saved_as)))
        for first, conversion in self._converted.items():
            if id(self._holders[first][0]) in modules:
                filled |= self._convert(first, conversion)
        self._require_parameters(filled, modules)

    def require_complete(self, part: nn.Module) -> None:
        """Compares the files' tensors with those of the model or a part of it, before anything is read or allocated.

        Of those that are converted, the names alone.

        Raises: ConfigError when tensors are missing, or have other shapes.
        """
        for name, saved_as in self._plain.items():
            self._require_shape(name, self._shape(self.files.sliceable(saved_as)), self._held(name).shape)
        if all(len(conversion.target_patterns) == 1 for conversion in self._converted.values()):
            found = {id(self._held(name)) for name in (*self._plain, *self._converted)}
            self._require_parameters(found, {id(module) for module in part.modules()})

    def _require_parameters(self, filled: set[int], modules: set[int]) -> None:
        """Raises: ConfigError if parameters of the modules are not among the filled tensors."""
        missing = [
            name
            for name, (module, attribute) in self._holders.items()
            if id(module) in modules
            and isinstance(held := getattr(module, attribute), nn.Parameter)
            and id(held) not in filled
        ]
        if missing:
            raise ConfigError(
                f"the files in {self.path} have no {_listed(missing)}; choose a model whose files are complete"
            )

    def _plan(self, conversions: list[Any]) -> None:
        renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
        converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        known, prefix = self.model.state_dict(), self.model.base_model_prefix
        for saved_as in self.files.names():
            name, pattern = rename_source_key(saved_as, renamings, converters, prefix, known)
            if name not in known and saved_as in known:
                name, pattern = saved_as, None
            if name not in known:  # of a part that this class of model does not have
                continue
            if pattern is None:
                self._plain[name] = saved_as
                continue
            conversion = self._converted.setdefault(name, deepcopy(by_pattern[pattern]))
            read: Any = partial(self.files.read, saved_as)  # typed as a future, called if it is none
            conversion.add_tensor(name, saved_as, pattern, read)

    def _convert(self, first: str, conversion: WeightConverter) -> set[int]:
        """Fills the tensors that a conversion makes; of stacked experts only this rank's are read."""
        module, attribute = self._holders[first]
        local_pieces = _own_pieces(getattr(module, attribute)) if _stacks(conversion) else None
        if local_pieces is not None:
            if len(local_pieces) == 0:
                return {id(getattr(module, attribute))}
            for pattern, pieces in conversion.collected_tensors.items():
                conversion.collected_tensors[pattern] = pieces[local_pieces.start : local_pieces.stop]
        made = conversion.convert(first, model=self.model, config=self.model.config)
        filled = set[int]()
        for name, converted in made.items():
            tensor = converted[0] if isinstance(converted, list) else converted
            filled.add(self._fill(name, tensor, is_own=local_pieces is not None))
        return filled

    @torch.no_grad()
    def _fill(self, name: str, saved: Any, *, is_own: bool = False) -> int:
        """Copies this rank's part of a tensor of the files; returns the identity of the tensor in memory.

        Raises: ConfigError when it has another shape.
        """
        held = self._held(name)
        local = held.to_local() if isinstance(held, DTensor) else held
        self._require_shape(name, self._shape(saved), local.shape if is_own else held.shape)
        if local.numel() == 0:  # a tensor with fewer rows than ranks
            return id(held)
        local_part = (
            saved[...] if is_own or not isinstance(held, DTensor) else DtensorShardOperation(held).shard_tensor(saved)
        )
        assert local_part is not None, "only of one of several pieces a rank may have nothing"
        local.copy_(local_part)
        return id(held)

    def _held(self, name: str) -> Tensor:
        module, attribute = self._holders[name]
        held: Tensor = getattr(module, attribute)
        return held

    @staticmethod
    def _shape(saved: Any) -> list[int]:
        return list(saved.shape if isinstance(saved, Tensor) else saved.get_shape())

    def _require_shape(self, name: str, saved: list[int], wanted: torch.Size) -> None:
        if saved != list(wanted):
            raise ConfigError(
                f"{name} has the shape {saved} in the files of {self.path}, and {list(wanted)} by its config.json"
            )


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def _stacks(conversion: WeightConverter) -> bool:
    """True if a conversion stacks tensors along a new first dimension, and joins stacks along others."""
    first, *others = conversion.operations
    stacked = isinstance(first, MergeModulelist) and first.dim == 0
    return stacked and all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in others)


def _own_pieces(held: Tensor) -> range | None:
    """This rank's part of the first dimension; None if the others are sharded too."""
    if not isinstance(held, DTensor):
        return None
    if any(getattr(placement, "dim", 0) % held.ndim for placement in held.placements):
        return None
    shape, offset = compute_local_shape_and_global_offset(held.shape, held.device_mesh, held.placements)
    return range(offset[0], offset[0] + shape[0])


def _listed(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - NAMED_AT_MOST} more" if len(listed) > NAMED_AT_MOST else ""
    return ", ".join(listed[:NAMED_AT_MOST]) + more
