"""Parameters and buffers of a model in memory, under the names and in the shapes of its saved state dict."""

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion


def saved_form(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Views of some tensors of a model, under the names and in the pieces in which transformers saves them."""
    with _WithoutCopies():
        pieces: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return pieces


def saved_buffers(model: Any) -> dict[str, Tensor]:
    """What is no parameter and saved all the same, by name in memory: the bias by which experts are chosen, say.

    Tables of whole numbers are not published.
    """
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point()}


class _WithoutCopies(TorchFunctionMode):
    """Makes `contiguous` return what it is called on, so that pieces stay views of the whole."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))
