"""vLLM's workers: complete versions, tied heads, and the end of their processes."""

import gc
import signal
import threading
import weakref
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contract.engines import VLLM_WARNINGS
from tests.rollout_servers.engines.vllm.over_gloo import put_in_nccls_place

pytestmark = [pytest.mark.usefixtures("vllm_environment"), VLLM_WARNINGS]


class Model(nn.Module):
    """Returns the names of loaded tensors, as vLLM's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.zeros(2)) for _ in range(3))

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        return {name for name, _ in tensors}


def update(*names: str) -> dict[str, Any]:
    return {"names": names, "dtype_names": ["float32"] * len(names), "shapes": [[2]] * len(names)}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a version in several buckets, whose broadcasts do nothing."""
    from slipstream.rollout_servers.engines.vllm.worker import CompleteNccl

    put_in_nccls_place(monkeypatch.setattr)
    text = SimpleNamespace(tie_word_embeddings=False)
    config: Any = SimpleNamespace(
        parallel_config=None, model_config=SimpleNamespace(hf_config=text, hf_text_config=text)
    )
    receiver: Any = CompleteNccl(None, config, torch.device("cpu"), Model())  # type: ignore[arg-type]  # unused
    receiver.packed, receiver.packed_buffer_size_bytes = True, 8  # bytes: two tensors make a bucket
    receiver.model_update_group = SimpleNamespace(broadcast=lambda bucket, src: None)
    return receiver


def test_bucket_is_loaded_to_its_end_before_the_next(receiver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    receiver.model_update_group = SimpleNamespace(broadcast=lambda bucket, src: events.append("broadcast"))
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.synchronize", lambda: events.append("synchronize"))
    receiver.receive_weights(receiver.update_info_cls(**update("first", "second", "third")))
    assert events == ["broadcast", "synchronize"] * 2


def test_broadcast_without_a_parameter_fails(receiver: Any) -> None:
    for _ in range(2):
        receiver.update_weights(update("first", "second", "third"))
        with pytest.raises(RuntimeError, match=r" second$"):
            receiver.update_weights(update("first", "third"))


@pytest.mark.parametrize(("has_head", "has_embedding"), [(False, True), (True, False), (False, False)])
def test_pipeline_rank_without_head_or_embedding_ties_nothing(has_head: bool, has_embedding: bool) -> None:
    from vllm.model_executor.models.utils import PPMissingLayer

    from slipstream.rollout_servers.engines.vllm.worker import tie_head

    head = nn.Linear(2, 2) if has_head else PPMissingLayer()
    embedding = nn.Embedding(2, 2) if has_embedding else PPMissingLayer()
    rank: Any = SimpleNamespace(lm_head=head, model=SimpleNamespace(embed_tokens=embedding))
    tie_head(rank)
    assert (rank.lm_head, rank.model.embed_tokens) == (head, embedding)


class Node:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def signals() -> Iterator[list[int]]:
    """Calls of the handler of SIGTERM that stands for vLLM's."""
    numbers: list[int] = []
    before, callbacks = signal.signal(signal.SIGTERM, lambda number, frame: numbers.append(number)), list(gc.callbacks)
    yield numbers
    signal.signal(signal.SIGTERM, before)
    gc.callbacks[:] = callbacks
    gc.unfreeze()
    gc.collect()


@pytest.mark.parametrize("in_thread", [False, True], ids=["process-of-vllm", "rollout-server"])
def test_process_of_vllm_ends_without_garbage_collection(signals: list[int], in_thread: bool) -> None:
    from slipstream.rollout_servers.engines.vllm.worker import end_without_collecting

    def is_collected() -> bool:
        garbage = weakref.ref(Node())
        gc.collect()
        return garbage() is None

    if in_thread:
        thread = threading.Thread(target=end_without_collecting)
        thread.start()
        thread.join()
    else:
        end_without_collecting()
    assert is_collected()
    signal.raise_signal(signal.SIGTERM)
    assert signals == [signal.SIGTERM]
    assert is_collected() == in_thread
