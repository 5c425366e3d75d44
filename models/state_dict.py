"""Tensors of a model as transformers' files have them.

In memory some models have tensors of other names and shapes: mostly, transformers stacks experts.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


class _WithoutCopies(TorchFunctionMode):
    """`Tensor.contiguous` returns its tensor: transformers copies the parts into which it cuts a weight."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def saved_parts(model: nn.Module, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Views of tensors of a model, under the names and in the parts in which transformers saves them.

    Of a model that is neither of transformers nor has the conversions of one, the tensors themselves.
    """
    if not (isinstance(model, PreTrainedModel) or hasattr(model, "_weight_conversions")):
        return tensors
    converted: Any = model
    with _WithoutCopies():
        parts: dict[str, Tensor] = revert_weight_conversion(converted, dict(tensors))
    return parts


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that files have, such as the bias by which experts are chosen, by name in memory."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def published_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Saved buffers that versions have: a table of whole numbers is no weight, and engines keep theirs."""
    return {name: buffer for name, buffer in saved_buffers(model).items() if buffer.is_floating_point()}
