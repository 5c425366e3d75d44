"""The engine over a server that misbehaves; over SGLang's own it runs through the contract of all engines."""

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
from tests.contract.policies import write_policy
from tests.contract.trainer import Trainer
from tests.rollout_servers.engines.sglang.stubbed import LONG_S, engine_over_stub, heard, until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "model"
    write_policy(folder, tied=True)
    return folder


def asking(engine: SglangEngine, *, deadline_s: float) -> "asyncio.Future[Any]":
    return asyncio.ensure_future(engine.generate(Request([3, 5], samples=2, deadline_s=deadline_s)))


async def test_a_server_that_would_cut_answers_silently_is_not_started(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_LONGEST", "700")
    with pytest.raises(EngineError, match=r"sequences of 700 tokens, not for rollout\.engine\.max_model_len=4096"):
        async with engine_over_stub(model, tmp_path):
            pass


async def test_an_abort_waits_for_the_end_of_an_update_because_sglang_would_lose_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_UPDATE_S", "0.5")
    # Nor is an update that takes its time mistaken for a death: weights.deadline_s holds for calls too.
    monkeypatch.setattr(calls, "CALL_DEADLINE_S", 0.1)
    async with engine_over_stub(model, tmp_path) as engine:
        trainer = Trainer(engine, tied=True)
        updating = asyncio.ensure_future(trainer.update())
        await until(lambda paths: "/update_weights_from_disk" in paths, engine)
        answers = await asking(engine, deadline_s=0.1)
        assert [(list(answer.token_ids), answer.finish_reason) for answer in answers] == [([3], "abort")] * 2
        assert await updating > 0.5
        assert (await heard(engine))[:3] == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
        assert engine.version == 1
        trainer.staging.abandon()


async def test_an_update_that_sglang_breaks_off_ends_it_and_all_who_wait_hear_of_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_REFUSES", "/update_weights_from_disk")
    async with engine_over_stub(model, tmp_path) as engine:
        trainer = Trainer(engine, tied=True)
        waiting = asking(engine, deadline_s=LONG_S)
        with pytest.raises(EngineError, match=r"half of version 1: .*half of it is bad") as death:
            await trainer.update()
        assert not isinstance(death.value, UpdateFailed)
        with pytest.raises(EngineError, match="half of version 1"):
            await waiting
        for call in (asking(engine, deadline_s=LONG_S), engine.score([3, 5]), engine.pressure()):
            with pytest.raises(EngineError, match="half of version 1"):
                await call
        trainer.staging.abandon()


async def test_a_scheduler_that_hangs_behind_a_server_that_does_not_is_found_dead(model: Path, tmp_path: Path) -> None:
    async with engine_over_stub(model, tmp_path) as engine:
        assert (await engine.pressure()).kv_cache_usage == 0.5
        await engine._calls.post("/hangs_from_now_on", {})
        waiting = asking(engine, deadline_s=LONG_S)
        engine._calls.deadline_s = 0.5
        async with asyncio.timeout(LONG_S):
            for call in (engine.pressure(), waiting):
                with pytest.raises(EngineError, match=r"did not answer within 0\.5 s"):
                    await call


async def test_what_came_before_an_update_outlives_a_server_that_dies_after_it(model: Path, tmp_path: Path) -> None:
    async with engine_over_stub(model, tmp_path) as engine:
        trainer = Trainer(engine, tied=True)
        waiting = asking(engine, deadline_s=LONG_S)
        async with asyncio.timeout(LONG_S):
            while (
                sum(len(answer.token_ids) for in_flight in engine._pause.in_flight for answer in in_flight.so_far()) < 2
            ):
                await heard(engine)
        await trainer.update()
        os.kill(engine.server.pid, signal.SIGKILL)
        with pytest.raises(EngineError) as death:
            await waiting
        in_flight = Completion(token_ids=[3], logprobs=[-0.5], spans=[VersionSpan(0, 0, 1)], finish_reason="abort")
        assert death.value.unfinished == [in_flight] * 2
        trainer.staging.abandon()


async def test_what_is_cancelled_is_aborted_by_name_because_sglang_may_not_notice_who_hangs_up(
    model: Path, tmp_path: Path
) -> None:
    async with engine_over_stub(model, tmp_path) as engine:
        waiting = asking(engine, deadline_s=LONG_S)
        await heard(engine)  # now both requests have been sent
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await heard(engine)).count("/abort_request") == 2


async def test_what_closing_makes_of_answers_is_not_taken_for_their_end(model: Path, tmp_path: Path) -> None:
    async with engine_over_stub(model, tmp_path) as engine:
        waiting = asking(engine, deadline_s=LONG_S)
        await heard(engine)  # now both requests have been sent
        await engine.close()
        with pytest.raises(EngineError, match="SGLang was closed") as death:
            await waiting
        assert [answer.finish_reason for answer in death.value.unfinished or ()] == ["abort"] * 2


async def test_more_tokens_than_a_model_has_positions_are_refused(tmp_path: Path) -> None:
    GPT2Config(n_positions=64).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="max_model_len=4096 is more than the 64 positions"):
        async with engine_over_stub(tmp_path, tmp_path):
            pass
