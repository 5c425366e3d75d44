"""vLLM's LoRA layers on a CPU, for an engine whose requests all have the same adapter.

# N tokens, R rank, I inputs and O outputs of a slice of a linear layer
"""

from typing import Any

from torch import Tensor
from torch.nn import functional
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms.cpu import CpuPlatform


class OneAdapter(PunicaWrapperCPU):
    """Adds the adapter in slot 0 by two matrix products for each slice.

    vLLM's own operations gather a copy of A and B for every token, which for a prompt of some hundred tokens takes
    longer than the model itself.
    """

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        """Adds scale * x A^T B^T to the slices of y.

        Args:
            y: shape [N, sum of O], changed in place.
            x: shape [N, I].
            lora_a_stacked: for each slice, shape [slots, 1, R, I].
            lora_b_stacked: for each slice, shape [slots, 1, O, R].
        """
        start = 0
        for a_RI, b_OR, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            states_NR = functional.linear(x, a_RI[0, 0]).to(y.dtype)
            y[:, start : start + width].addmm_(states_NR, b_OR[0, 0].T.to(y.dtype), alpha=scale)
            start += width


def use_one_adapter() -> None:
    """Makes models that vLLM loads on a CPU from now on use `OneAdapter`."""
    name = f"{OneAdapter.__module__}.{OneAdapter.__qualname__}"
    CpuPlatform.get_punica_wrapper = classmethod(lambda _: name)  # type: ignore[method-assign]
