"""Cost and result of vLLM's LoRA layers on a CPU, with the one adapter of an engine."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("vllm")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="layers on a CPU")

TOKENS, RANK, INPUTS, WIDTHS = 300, 16, 64, (48, 32, 32)


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that an operation returns."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.numbers = max(self.numbers, found.numel())
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapter_is_applied_without_copies_for_each_token(dtype: torch.dtype) -> None:
    from vllm.lora.punica_wrapper import get_punica_wrapper

    import slipstream.rollout_servers.engines.vllm.worker  # noqa: F401  (chooses the layers)

    torch.manual_seed(0)
    layers: Any = get_punica_wrapper(max_num_batched_tokens=TOKENS, max_batches=1, device="cpu")
    y, x = torch.randn(TOKENS, sum(WIDTHS)).to(dtype), torch.randn(TOKENS, INPUTS).to(dtype)
    a = tuple(torch.randn(1, 1, RANK, INPUTS).to(dtype) for _ in WIDTHS)
    b = tuple(torch.randn(1, 1, width, RANK).to(dtype) for width in WIDTHS)
    change = [x.double() @ one[0, 0].double().T @ two[0, 0].double().T for one, two in zip(a, b, strict=True)]
    expected = y.double() + 0.5 * torch.cat(change, dim=1)
    with Largest() as largest:
        layers.add_lora_linear(y, x, a, b, 0.5, WIDTHS)
    assert (y.double() - expected).abs().max() < (1e-4 if dtype == torch.float32 else 0.02) * expected.abs().max()
    assert largest.numbers <= TOKENS * sum(WIDTHS)
