"""A staged version in a folder, as SGLang reads it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from transformers import Qwen3Config

from slipstream.buffer.wire.weights.layout import layout
from slipstream.buffer.wire.weights.protocol import Manifest, TensorInfo
from slipstream.buffer.wire.weights.shm import SHARED_MEMORY
from slipstream.rollout_servers.engines.base import UpdateFailed
from slipstream.rollout_servers.engines.sglang.transfer import Tensors, weights_folder
from slipstream.rollout_servers.engines.staging import Staging

CONFIG = Qwen3Config(
    vocab_size=32,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    tie_word_embeddings=True,
)


def manifest_of(tensors: list[TensorInfo]) -> Manifest:
    return Manifest(version=4, tensors=tensors, bucket_bytes=1 << 16, evaluate=False)


SHAPES = {"a": [3, 5], "b": [], "c": [2, 1, 3]}
"""Sizes that are no multiple of the alignment, and a scalar."""
TOO_LARGE = manifest_of([TensorInfo(name="a", dtype="float32", shape=[1 << 40])])


@pytest.fixture
def staging(run_name: str) -> Iterator[Staging]:
    staging = Staging(run_name, shared=False)
    yield staging
    staging.abandon()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_a_folder_holds_what_was_staged_and_leaves_nothing(run_name: str, staging: Staging, dtype: str) -> None:
    manifest = manifest_of([TensorInfo(name=name, dtype=dtype, shape=shape) for name, shape in SHAPES.items()])
    memory = staging.begin(manifest)
    memory.copy_(torch.randint(0, 256, (layout(manifest.tensors)[1],), dtype=torch.uint8))
    async with weights_folder(run_name, manifest, staging) as folder:
        assert (folder / "model.safetensors").resolve().parent == SHARED_MEMORY
        read = load_file(folder / "model.safetensors")
        assert [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in read.items()] == [
            (name, shape, f"torch.{dtype}") for name, shape in SHAPES.items()
        ]
        assert {name: _digest(tensor) for name, tensor in read.items()} == {
            name: _digest(tensor) for name, tensor in staging.named_tensors(manifest)
        }
    assert not folder.exists()
    assert not list(SHARED_MEMORY.glob(f"slipstream-{run_name}-*"))


async def test_a_folder_is_gone_after_an_error_too(run_name: str, staging: Staging) -> None:
    manifest = manifest_of([TensorInfo(name="a", dtype="float32", shape=[3])])
    staging.begin(manifest)
    left: list[Path] = []
    with pytest.raises(ZeroDivisionError):
        async with weights_folder(run_name, manifest, staging) as folder:
            left.append(folder)
            raise ZeroDivisionError
    assert not left[0].exists()
    assert not list(SHARED_MEMORY.glob(f"slipstream-{run_name}-*"))


async def test_a_version_that_shared_memory_has_no_room_for_fails_the_update(run_name: str, staging: Staging) -> None:
    with pytest.raises(UpdateFailed, match=r"version 4 can't be handed to SGLang: .*can't hold .* MB of weights"):
        async with weights_folder(run_name, TOO_LARGE, staging):
            pass


def test_a_version_must_have_every_tensor_of_the_model_no_other_and_all_of_their_shape() -> None:
    tensors = Tensors.of(CONFIG)
    whole = [TensorInfo(name=name, dtype="float32", shape=list(shape)) for name, shape in tensors.shapes.items()]
    assert "lm_head.weight" not in tensors.shapes, "it is tied"
    tensors.check(manifest_of(whole))
    with pytest.raises(UpdateFailed, match=r"version 4: no weights came for model\.norm\.weight$"):
        tensors.check(manifest_of([tensor for tensor in whole if tensor.name != "model.norm.weight"]))
    with pytest.raises(UpdateFailed, match="the model has no ghost"):
        tensors.check(manifest_of([*whole, TensorInfo(name="ghost", dtype="float32", shape=[1])]))
    wrong = [TensorInfo(name=t.name, dtype=t.dtype, shape=t.shape[::-1]) for t in whole]
    with pytest.raises(UpdateFailed, match=r"of the wrong shape came model\.embed_tokens\.weight"):
        tensors.check(manifest_of(wrong))


def _digest(tensor: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(tensor.reshape(-1).view(torch.uint8).numpy().data)
