"""A start of vLLM's AsyncLLM that takes too long, or is given up."""

import asyncio
import gc
import threading
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from slipstream.configs import RunConfig
from slipstream.rollout_servers.engines.base import EngineError, EngineSettings, UpdateFailed
from slipstream.rollout_servers.engines.registry import start_engine
from tests.contract.policies import write_policy
from tests.contract.subject import children
from tests.rollout_servers.engines.mortal import DEADLINE_S, until

# vLLM and what it imports warn of their own futures.
pytestmark = [
    pytest.mark.usefixtures("vllm_environment"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # vLLM leaves its sockets to the garbage collector
async def test_a_start_that_is_given_up_leaves_no_process_behind(tmp_path: Path) -> None:
    write_policy(tmp_path / "model", tied=True)
    engine = {"core": "process", "max_model_len": 2048, "kv_cache_bytes": 4 << 20, "start_deadline_s": 100}
    config = RunConfig.model_validate(
        {"model": {"path": tmp_path / "model", "dtype": "float32"}, "rollout": {"engine": engine}}
    )
    before = {child.pid for child in children()}
    starting = asyncio.create_task(start_engine(config, tmp_path / "model", eos_token_ids=()))
    async with asyncio.timeout(100):
        while not [child for child in children() if child.pid not in before]:
            assert not starting.done()
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert not [child for child in children() if child.pid not in before]
    del starting
    await asyncio.sleep(0)  # the loop forgets it
    gc.collect()


async def test_what_starts_too_late_is_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.rollout_servers.engines.vllm import core as loading

    late, may_start = Mock(), threading.Event()

    def load(_: object) -> Mock:
        may_start.wait(DEADLINE_S)
        return late

    monkeypatch.setattr(loading, "_load", load)
    monkeypatch.setattr(loading, "_END_S", 0.01)
    with pytest.raises(EngineError, match=r"did not start within 0\.01 s"):
        await loading.load({}, deadline_s=0.01)
    assert not late.shutdown.called
    may_start.set()
    await until(lambda: late.shutdown.called)


async def test_an_engine_that_does_not_take_its_first_version_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.rollout_servers.engines.vllm import process

    core = Mock(set_version=AsyncMock(side_effect=UpdateFailed("vLLM failed")), close=AsyncMock())
    monkeypatch.setattr(process, "load", AsyncMock(return_value=Mock()))
    monkeypatch.setattr(process, "Core", lambda *_, **__: core)
    config = RunConfig.model_validate({"model": {"path": tmp_path}})
    with pytest.raises(UpdateFailed, match="vLLM failed"):
        await process.ProcessEngine.start(EngineSettings.from_config(config, tmp_path, eos_token_ids=()))
    core.close.assert_awaited_once()
