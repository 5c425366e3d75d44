"""The engine over a stub that misbehaves; the contract of all engines runs over SGLang's own server."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines.base import Completion, EngineError, Request, UpdateFailed
from slipstream.rollout_servers.engines.sglang import server as calls
from slipstream.rollout_servers.engines.sglang.engine import SglangEngine
from tests.contract.trainer import Trainer
from tests.rollout_servers.engines.sglang.stubbed import LONG_S, engine_over_stub, posted, until

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
