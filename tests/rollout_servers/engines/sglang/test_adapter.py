"""Adapters in SGLang: loaded under a new name, then all requests continue with it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.buffer.wire.weights.layout import layout
from slipstream.buffer.wire.weights.protocol import AdapterConfig, Manifest, TensorInfo
from slipstream.rollout_servers.engines.base import Request, UpdateFailed
from slipstream.rollout_servers.engines.sglang import protocol as requests
from slipstream.rollout_servers.engines.sglang.engine import SglangEngine
from slipstream.rollout_servers.engines.sglang.transfer import weights_folder
from slipstream.rollout_servers.engines.staging import Staging
from tests.rollout_servers.engines.sglang.stubbed import LONG_S, engine_over_stub, generated, posted

LORA = {"rank": 2, "alpha": 4}
CONFIG: AdapterConfig = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
TENSORS = [TensorInfo("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "float32", [2, 3])]


def manifest_of(version: int) -> Manifest:
    return Manifest(version=version, tensors=TENSORS, bucket_bytes=1 << 20, evaluate=False, adapter=CONFIG)


@pytest.fixture
def staging(run_name: str) -> Iterator[Staging]:
    """An adapter in staging memory."""
    staging = Staging(run_name, shared=False)
    staging.begin(manifest_of(1)).copy_(torch.arange(layout(TENSORS)[1], dtype=torch.uint8))
    yield staging
    staging.abandon()


async def until_generated(engine: SglangEngine, tokens: int) -> None:
    """Waits until the answers in flight have so many tokens together."""
    async with asyncio.timeout(LONG_S):
        while sum(len(each.token_ids) for flight in engine._pause.in_flight for each in flight.so_far()) < tokens:
            await posted(engine)


async def test_folder_is_one_of_peft(run_name: str, staging: Staging) -> None:
    async with weights_folder(run_name, manifest_of(1), staging) as folder:
        assert {path.name for path in folder.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
        assert json.loads((folder / "adapter_config.json").read_text()) == CONFIG
        (tensor,) = load_file(folder / "adapter_model.safetensors").values()
        assert torch.equal(tensor, dict(staging.named_tensors(manifest_of(1)))[TENSORS[0].name])


async def test_running_answers_continue_with_each_adapter(model: Path, tmp_path: Path, staging: Staging) -> None:
    async with engine_over_stub(model, tmp_path, lora=LORA) as engine:
        asking = asyncio.ensure_future(engine.generate(Request([3, 5], samples=2, deadline_s=LONG_S, max_tokens=3)))
        for version in (1, 2):
            await until_generated(engine, 2 * version)
            await engine.install(version, manifest_of(version), staging)
            assert engine.version == version
        await until_generated(engine, 6)
        await engine._abort([f"slipstream-{number:016}" for number in (4, 5)])
        for answer in await asking:
            assert answer.token_ids == [3, 3, 3]
            assert answer.spans == [VersionSpan(version, version, version + 1) for version in range(3)]
        wanted = [(2, None), (3, "version-1"), (4, "version-2")]
        assert await generated(engine) == [each for each in wanted for _ in range(2)]
        adapters = [path for path in await posted(engine) if "adapter" in path]
        assert adapters == [requests.LOAD_ADAPTER, requests.LOAD_ADAPTER, requests.UNLOAD_ADAPTER]


async def test_answer_that_is_long_enough_is_not_continued(model: Path, tmp_path: Path, staging: Staging) -> None:
    async with engine_over_stub(model, tmp_path, lora=LORA) as engine:
        asking = asyncio.ensure_future(engine.generate(Request([3, 5], deadline_s=LONG_S, max_tokens=1)))
        await until_generated(engine, 1)
        await engine.install(1, manifest_of(1), staging)
        (answer,) = await asking
        assert (answer.finish_reason, answer.token_ids) == ("length", [3])


async def test_refused_adapter_changes_nothing(
    model: Path, tmp_path: Path, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_REFUSES", requests.LOAD_ADAPTER)
    async with engine_over_stub(model, tmp_path, lora=LORA) as engine:
        with pytest.raises(UpdateFailed, match="version 1"):
            await engine.install(1, manifest_of(1), staging)
        assert engine.version == 0
        assert (await engine.pressure()).kv_cache_usage == 0.5
