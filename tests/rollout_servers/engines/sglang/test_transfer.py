"""Updates of SGLang: a staged version in a folder, and broadcasts to its workers."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from transformers import Qwen3Config

from slipstream.buffer.wire.weights.layout import SHARED_MEMORY, layout
from slipstream.buffer.wire.weights.protocol import Form, Manifest, TensorInfo
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines.base import DirectSource, EngineError, Request, UpdateFailed
from slipstream.rollout_servers.engines.sglang import protocol as requests
from slipstream.rollout_servers.engines.sglang import transfer
from slipstream.rollout_servers.engines.sglang.arguments import INFO
from slipstream.rollout_servers.engines.sglang.engine import SglangEngine
from slipstream.rollout_servers.engines.sglang.transfer import SglangTransfer, Tensors, uses_nccl, weights_folder
from slipstream.rollout_servers.engines.staging import Staging
from tests.rollout_servers.engines.sglang.stubbed import LONG_S, engine_over_stub, posted
from tests.rollout_servers.engines.sglang.test_arguments import settings

# --- a staged version --------------------------------------------------------------------------------------

TIED = Qwen3Config(
    vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
)  # fmt: skip
SHAPES = {"a": [3, 5], "b": [], "c": [2, 1, 3]}
"""Sizes that are no multiple of the alignment, and a scalar."""


def manifest_of(shapes: dict[str, list[int]], *, dtype: str = "float32", version: int = 4) -> Manifest:
    tensors = [TensorInfo(name, dtype, shape) for name, shape in shapes.items()]
    return Manifest(version=version, tensors=tensors, bucket_bytes=1 << 20, evaluate=False)


@pytest.fixture
def staging(run_name: str) -> Iterator[Staging]:
    staging = Staging(run_name, shared=False)
    yield staging
    staging.abandon()
    assert not list(SHARED_MEMORY.glob(f"slipstream-{run_name}-*"))


def digests(tensors: Any) -> dict[str, tuple[int, torch.dtype, list[int]]]:
    return {
        name: (
            xxhash.xxh3_64_intdigest(tensor.reshape(-1).view(torch.uint8).numpy().data),
            tensor.dtype,
            list(tensor.shape),
        )
        for name, tensor in tensors
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_folder_holds_the_staged_version_and_is_deleted(run_name: str, staging: Staging, dtype: str) -> None:
    manifest = manifest_of(SHAPES, dtype=dtype)
    staging.begin(manifest).copy_(torch.randint(0, 256, (layout(manifest.tensors)[1],), dtype=torch.uint8))
    with pytest.raises(ZeroDivisionError):
        async with weights_folder(run_name, manifest, staging) as folder:
            assert (folder / "model.safetensors").resolve().parent == SHARED_MEMORY
            read = load_file(folder / "model.safetensors")
            assert digests(read.items()) == digests(staging.named_tensors(manifest))
            raise ZeroDivisionError
    assert not folder.exists()


async def test_version_too_large_for_shared_memory_fails(run_name: str, staging: Staging) -> None:
    with pytest.raises(UpdateFailed, match="version 4"):
        async with weights_folder(run_name, manifest_of({"a": [1 << 40]}), staging):
            pass


def test_version_must_have_the_models_tensors() -> None:
    tensors = Tensors.of(TIED)
    shapes = {name: list(shape) for name, shape in tensors.shapes.items()}
    assert "lm_head.weight" not in shapes, "it is tied"
    tensors.check(manifest_of(shapes))
    norm = "model.norm.weight"
    for wrong, named in (
        ({name: shape for name, shape in shapes.items() if name != norm}, norm),
        (shapes | {"ghost": [1]}, "ghost"),
        (shapes | {norm: [2, 4]}, norm),
    ):
        with pytest.raises(UpdateFailed, match=rf"version 4: .* {named}$"):
            tensors.check(manifest_of(wrong))


# --- broadcasts --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks of each rendezvous, which succeeds at once."""
    joined: list[int] = []

    async def meet(group: Form, *, ranks: int) -> str:
        joined.append(ranks)
        return ""

    monkeypatch.setattr(transfer, "await_rendezvous", meet)
    return joined


def transfer_of(engine: SglangEngine, *, workers: int = 1) -> SglangTransfer:
    return SglangTransfer(engine._calls, engine._pause, engine._tensors, workers=workers)


def form(epoch: int, *, deadline_s: float = LONG_S) -> Form:
    return Form(
        transfer=1, epoch=epoch, transport="nccl_sglang", host="127.0.0.1", port=1, rank=1, world=2,
        deadline_s=deadline_s,
    )  # fmt: skip


def version(engine: SglangEngine, number: int, *, without: Sequence[str] = ()) -> Manifest:
    """A version of the engine's model, in several buckets."""
    shapes = {name: list(shape) for name, shape in engine._tensors.shapes.items() if name not in without}
    return manifest_of(shapes, version=number)


def source(*, approved: bool = False) -> DirectSource:
    source = DirectSource("nccl_sglang")
    if approved:
        source.approved.set()
    return source


async def test_broadcast_versions_are_loaded_once_approved(model: Path, tmp_path: Path, rendezvous: list[int]) -> None:
    async with engine_over_stub(model, tmp_path) as engine:
        receiver = transfer_of(engine, workers=2)
        for number in (1, 2):
            await receiver.join(form(number))
            broadcast = source()
            installing = asyncio.create_task(receiver.install(version(engine, number), broadcast))
            await broadcast.received.wait()
            assert engine.version == number - 1
            broadcast.approved.set()
            assert await installing > 0
            assert engine.version == number
        paths = await posted(engine)
        update = [requests.PAUSE, requests.BEGIN_UPDATE, requests.END_UPDATE, requests.CONTINUE]
        assert [path for path in paths if path != requests.RECEIVE] == [
            *(requests.JOIN_GROUP, *update),
            *(requests.LEAVE_GROUP, requests.JOIN_GROUP, *update),
        ]
        assert paths.count(requests.RECEIVE) > 2
        assert rendezvous == [2, 2]


def test_only_the_last_bucket_sets_the_version_and_drops_prefixes() -> None:
    tensors = [TensorInfo("a", "bfloat16", [2, 3]), TensorInfo("b", "float32", [4])]
    body = requests.bucket_request(tensors, "epoch7")
    assert body == {
        "names": ["a", "b"], "dtypes": ["bfloat16", "float32"], "shapes": [[2, 3], [4]], "group_name": "epoch7",
        "load_format": "flattened_bucket", "weight_version": None, "flush_cache": False,
    }  # fmt: skip
    last = requests.bucket_request(tensors, "epoch7", version=3)
    assert last == {**body, "weight_version": "3", "flush_cache": True}


async def test_version_of_another_model_is_refused_before_the_pause(model: Path, tmp_path: Path) -> None:
    async with engine_over_stub(model, tmp_path) as engine:
        receiver = transfer_of(engine)
        with pytest.raises(UpdateFailed, match="no group"):
            await receiver.install(version(engine, 1), source())
        await receiver.join(form(1))
        with pytest.raises(UpdateFailed, match=r"version 1: .* lm_head\.weight"):
            await receiver.install(version(engine, 1, without=["lm_head.weight"]), source())
        assert await posted(engine) == [requests.JOIN_GROUP]


@pytest.mark.parametrize("refused", [requests.BEGIN_UPDATE, requests.RECEIVE, requests.END_UPDATE])
async def test_failed_broadcast_ends_the_server(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    monkeypatch.setenv("STUB_REFUSES", refused)
    async with engine_over_stub(model, tmp_path) as engine:
        receiver = transfer_of(engine)
        await receiver.join(form(1))
        with pytest.raises(EngineError, match=r"half of version 1: .*half of it is bad") as crash:
            await receiver.install(version(engine, 1), source(approved=True))
        assert not isinstance(crash.value, UpdateFailed)
        with pytest.raises(EngineError, match="half of version 1"):
            await engine.generate(Request([3, 5], LONG_S))
        assert engine.server.ended.done()


async def test_cancelled_broadcast_is_a_crash(model: Path, tmp_path: Path) -> None:
    async with engine_over_stub(model, tmp_path) as engine:
        receiver, broadcast = transfer_of(engine), source()
        await receiver.join(form(1))
        installing = asyncio.create_task(receiver.install(version(engine, 1), broadcast))
        await broadcast.received.wait()
        installing.cancel()
        await asyncio.wait([installing])
        with pytest.raises(EngineError, match="half of version 1"):
            await engine.generate(Request([3, 5], LONG_S))


async def test_refused_group_is_no_crash(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_REFUSES", requests.JOIN_GROUP)
    async with engine_over_stub(model, tmp_path) as engine:
        with pytest.raises(UpdateFailed):
            await transfer_of(engine).join(form(1))
        assert await engine._calls.get(INFO)


async def test_workers_that_connect_too_late_are_ended(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_NEVER_ANSWERS", requests.JOIN_GROUP)
    async with engine_over_stub(model, tmp_path) as engine:
        with pytest.raises(EngineError, match=r"0\.1 s"):
            await transfer_of(engine).join(form(1, deadline_s=0.1))
        assert engine.server.ended.done()


@pytest.mark.parametrize(
    ("options", "gpu", "reason"),
    [({}, False, r"weights\.transport=nccl"), ({"pp-size": 2}, True, r"rollout\.engine\.options\.pp-size=2")],
)
def test_impossible_broadcasts_are_refused(options: dict[str, Any], gpu: bool, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        uses_nccl(settings({"options": options}, transport="nccl"), gpu=gpu)


def test_broadcasts_are_used_only_where_configured() -> None:
    assert not uses_nccl(settings(), gpu=True)
