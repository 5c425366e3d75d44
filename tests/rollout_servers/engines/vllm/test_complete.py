"""A broadcast that brings too few tensors."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.rollout_servers.engines.vllm.over_gloo import put_in_nccls_place

pytestmark = [
    # vLLM and what it imports warn of their own futures.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.usefixtures("vllm_environment"),
]

BUCKET_BYTES = 8


class Model(nn.Module):
    """As vLLM's are: it says what it has loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.zeros(2)) for _ in range(3))

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Of one bucket."""
        return {name for name, _ in tensors}


def receiver(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Any:
    from slipstream.rollout_servers.engines.vllm.worker import CompleteNccl

    put_in_nccls_place(monkeypatch.setattr)
    text = SimpleNamespace(tie_word_embeddings=False)
    config: Any = SimpleNamespace(parallel_config=None, model_config=SimpleNamespace(hf_text_config=text))
    receiver: Any = CompleteNccl(None, config, torch.device("cpu"), model)  # type: ignore[arg-type]  # looked at by none
    receiver.packed, receiver.packed_buffer_size_bytes = True, BUCKET_BYTES
    receiver.model_update_group = SimpleNamespace(broadcast=lambda bucket, src: None)
    return receiver


def of(*names: str) -> dict[str, Any]:
    return {"names": names, "dtype_names": ["float32"] * len(names), "shapes": [[2]] * len(names)}


def test_a_version_without_one_of_the_models_tensors_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    receiving = receiver(model, monkeypatch)
    for _ in range(2):
        receiving.update_weights(of("first", "second", "third"))  # in several buckets
        with pytest.raises(RuntimeError, match=r"no weights came for second$"):
            receiving.update_weights(of("first", "third"))
