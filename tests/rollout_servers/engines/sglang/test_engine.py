"""The engine over a stub that misbehaves; the contract of all engines runs over SGLang's own server."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.buffer.wire.weights.layout import layout
from slipstream.buffer.wire.weights.protocol import AdapterConfig, Manifest, TensorInfo
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines.base import Completion, EngineError, Request, RequestRefused, UpdateFailed
from slipstream.rollout_servers.engines.sglang import protocol as requests
from slipstream.rollout_servers.engines.sglang import server as calls
from slipstream.rollout_servers.engines.sglang.engine import SglangEngine, abort_at, abort_on_error, all_or_none
from slipstream.rollout_servers.engines.sglang.transfer import InFlight, weights_folder
from slipstream.rollout_servers.engines.staging import Staging
from tests.contract.trainer import Trainer
from tests.rollout_servers.engines.sglang.stubbed import LONG_S, engine_over_stub, generated, posted, until

UPDATE = "/update_weights_from_disk"


def ask(engine: SglangEngine, *, deadline_s: float = LONG_S) -> "asyncio.Future[Any]":
    return asyncio.ensure_future(engine.generate(Request([3, 5], samples=2, deadline_s=deadline_s)))


async def test_server_without_room_for_a_context_is_not_started(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_LONGEST", "700")
    with pytest.raises(EngineError, match=r"700 .* rollout\.engine\.max_model_len=4096"):
        async with engine_over_stub(model, tmp_path):
            pass


async def test_context_beyond_the_models_positions_is_refused(tmp_path: Path) -> None:
    GPT2Config(n_positions=64).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"max_model_len=4096 .* 64"):
        async with engine_over_stub(tmp_path, tmp_path):
            pass


async def test_abort_waits_for_the_end_of_an_update(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_UPDATE_S", "0.5")
    # weights.deadline_s holds for calls too: a slow update is no crash.
    monkeypatch.setattr(calls, "CALL_DEADLINE_S", 0.1)
    async with engine_over_stub(model, tmp_path) as engine:
        trainer = Trainer(engine, tied=False)
        updating = asyncio.ensure_future(trainer.update())
        await until(lambda paths: UPDATE in paths, engine)
        answers = await ask(engine, deadline_s=0.1)
        assert [(list(answer.token_ids), answer.finish_reason) for answer in answers] == [([3], "abort")] * 2
        assert await updating > 0.5
        assert (await posted(engine))[:3] == ["/pause_generation", UPDATE, "/continue_generation"]
        assert engine.version == 1
        trainer.staging.abandon()


async def test_failed_update_ends_the_server_and_all_calls(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_REFUSES", UPDATE)
    async with engine_over_stub(model, tmp_path) as engine:
        trainer, waiting = Trainer(engine, tied=False), ask(engine)
        with pytest.raises(EngineError, match=r"half of version 1: .*half of it is bad") as crash:
            await trainer.update()
        assert not isinstance(crash.value, UpdateFailed)
        for call in (waiting, ask(engine), engine.score([3, 5]), engine.pressure()):
            with pytest.raises(EngineError, match="half of version 1"):
                await call
        trainer.staging.abandon()


async def test_hanging_scheduler_is_a_crash(model: Path, tmp_path: Path) -> None:
    async with engine_over_stub(model, tmp_path) as engine:
        assert (await engine.pressure()).kv_cache_usage == 0.5
        await engine._calls.post("/hangs_from_now_on", {})
        waiting = ask(engine)
        engine._calls.deadline_s = 0.5
        async with asyncio.timeout(LONG_S):
            for call in (engine.pressure(), waiting):
                with pytest.raises(EngineError, match=r"0\.5 s"):
                    await call


async def test_tokens_before_an_update_survive_a_later_crash(model: Path, tmp_path: Path) -> None:
    async with engine_over_stub(model, tmp_path) as engine:
        trainer, waiting = Trainer(engine, tied=False), ask(engine)
        async with asyncio.timeout(LONG_S):
            while sum(len(each.token_ids) for flight in engine._pause.in_flight for each in flight.so_far()) < 2:
                await posted(engine)
        await trainer.update()
        os.kill(engine.server.pid, signal.SIGKILL)
        with pytest.raises(EngineError) as crash:
            await waiting
        begun = Completion(token_ids=[3], logprobs=[-0.5], spans=[VersionSpan(0, 0, 1)], finish_reason="abort")
        assert crash.value.unfinished == [begun] * 2
        trainer.staging.abandon()


async def test_cancelled_request_is_aborted_by_name(model: Path, tmp_path: Path) -> None:
    async with engine_over_stub(model, tmp_path) as engine:
        waiting = ask(engine)
        await posted(engine)  # now both answers have been requested
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await posted(engine)).count("/abort_request") == 2


async def test_closing_fails_requests_with_their_answers_so_far(model: Path, tmp_path: Path) -> None:
    async with engine_over_stub(model, tmp_path) as engine:
        waiting = ask(engine)
        await posted(engine)  # now both answers have been requested
        await engine.close()
        with pytest.raises(EngineError, match="closed") as crash:
            await waiting
        assert [answer.finish_reason for answer in crash.value.unfinished or ()] == ["abort"] * 2


# --- requests in flight: answers kept after a crash, aborts, concurrent calls -----------------------------------------


def answer(*token_ids: int, end: str = "abort", version: int = 4) -> Completion:
    spans = [VersionSpan(version=version, start=0, end=len(token_ids))]
    return Completion(token_ids, [-float(token) for token in token_ids], spans, end)


def test_all_tokens_of_the_first_version_are_kept() -> None:
    answers = [answer(7)]
    in_flight = InFlight(4, lambda: answers)
    answers[0] = answer(7, 8)
    assert in_flight.left(4) == [answer(7, 8)]
    in_flight.before_update(4)  # which crashes the server
    assert in_flight.left(4) == [answer(7, 8)]


def test_only_tokens_before_the_first_update_are_kept() -> None:
    answers = [answer(7, 8), answer()]
    in_flight = InFlight(4, lambda: answers)
    in_flight.before_update(4)
    answers[:] = [answer(7, 8, 9), answer(5)]
    in_flight.before_update(5)
    answers[:] = [answer(7, 8, 9, 6), answer(5, 3)]
    assert in_flight.left(6) == [answer(7, 8), replace(answer(), spans=[])]


def test_finished_answer_is_kept_with_its_versions() -> None:
    answers = [answer(7), answer(6)]
    in_flight = InFlight(4, lambda: answers)
    in_flight.before_update(4)
    answers[0] = answer(7, 8, 9, end="stop", version=5)
    assert in_flight.left(5) == [answer(7, 8, 9, end="stop", version=5), answer(6)]


def test_no_token_of_a_request_sent_during_an_update_is_kept() -> None:
    in_flight = InFlight(4, lambda: [answer(7)])
    assert in_flight.left(5) is None
    in_flight.before_update(5)
    assert in_flight.left(6) is None


class Aborts:
    """Counts aborts; `enough` is set with the third."""

    def __init__(self) -> None:
        self.number = 0
        self.enough = asyncio.Event()

    async def __call__(self) -> None:
        self.number += 1
        if self.number == 3:
            self.enough.set()


async def test_abort_is_repeated_after_the_deadline() -> None:
    abort = Aborts()
    async with asyncio.timeout(LONG_S), abort_at(abort, deadline_s=0.01):
        await abort.enough.wait()


async def test_nothing_is_aborted_after_a_normal_end() -> None:
    abort = Aborts()
    async with abort_at(abort, deadline_s=0.01), abort_on_error(abort):
        pass
    async with asyncio.timeout(LONG_S):
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)
    assert abort.number == 0


@pytest.mark.parametrize("error", [EngineError("dead"), RequestRefused("no"), asyncio.CancelledError()])
async def test_failed_or_cancelled_request_is_aborted_once(error: BaseException) -> None:
    abort = Aborts()
    with pytest.raises(type(error)):
        async with abort_on_error(abort):
            raise error
    assert abort.number == 1


async def fails() -> None:
    raise EngineError("no")


async def test_first_failure_cancels_the_other_calls() -> None:
    cancelled = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(EngineError, match="no"):
        await all_or_none([waits(), fails()])
    assert cancelled.is_set()


async def test_timeout_after_a_failure_is_no_cancellation() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            with pytest.raises(EngineError):
                await all_or_none([fails()])
            await asyncio.Event().wait()


async def test_cancelling_waits_for_the_end_of_all_calls() -> None:
    running = ended = 0

    async def waits() -> None:
        nonlocal running, ended
        running += 1
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended += 1

    waiting = asyncio.create_task(all_or_none([waits(), waits(), waits()]))
    while running < 3:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == 3


# --- adapters in SGLang: loaded under a new name, then all requests continue with it ----------------------------------


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
