"""State dict of a model in the format of transformers' files, which engines load.

In memory some models have tensors of other names and shapes: mostly, transformers stacks experts.
"""

from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.models.lora import base_name, merged_weights
from slipstream.models.state_dict import saved_buffers, saved_parts


class HfStateDict:
    """The map from each saved tensor to a part of a tensor in memory; it is the same for all versions.

    Adapters are merged into the weights that they belong to.

    Attributes:
        tensors: shape and dtype of each saved tensor, by name, in the order of `gather`; they have no data.
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype) -> None:
        """Parameters are saved as `dtype`; buffers, such as the bias of a router, in their own dtype.

        Raises: ConfigError when a saved tensor is not just a part of one in memory.
        """
        self._model = model
        self._dtype = dtype
        self._parts: dict[str, Mapping[str, Tensor]] = {}
        self.tensors: dict[str, Tensor] = {}
        self._buffers = saved_buffers(model)  # first: FSDP2 reshards in it
        for parameter_name, parameter in model.named_parameters():
            name = base_name(parameter_name)
            if name is not None:
                self._add(name, parameter.shape, dtype)
        for name, buffer in self._buffers.items():
            self._add(name, buffer.shape, buffer.dtype)

    def gather(self) -> Iterable[tuple[str, Tensor]]:
        """Name and full tensor of everything that is saved; a collective: all ranks must consume it in step.

        Shards of several ranks are gathered in the dtype in which they are saved.
        """
        for name, held in chain(merged_weights(self._model, dtype=self._dtype), self._buffers.items()):
            whole = held.contiguous()
            for saved_as, part in self._parts[name].items():
                start = whole.storage_offset() + part.storage_offset()
                yield saved_as, whole.as_strided(part.shape, part.stride(), start)

    def _add(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        whole = torch.empty(shape, dtype=dtype, device="meta")
        parts = saved_parts(self._model, {name: whole})
        for saved_as, part in parts.items():
            if saved_as in self.tensors or (part is not whole and part._base is not whole):
                raise ConfigError(
                    f"a {type(self._model).__name__} can't be published: {saved_as}, as transformers saves it, is no "
                    f"part of {name} alone; choose another model.path"
                )
        self._parts[name] = parts
        self.tensors |= parts
