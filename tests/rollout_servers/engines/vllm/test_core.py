"""vLLM's engine core in a process of its own: failed starts, the gauge, a hang, a full queue."""

import asyncio
import gc
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import psutil
import pytest
import pytest_asyncio

from slipstream.configs import RunConfig
from slipstream.rollout_servers.engines.base import EngineError, EngineSettings, RequestRefused, UpdateFailed
from slipstream.rollout_servers.engines.registry import start_engine
from tests.contract.engines import NEEDS_VLLM, VLLM_WARNINGS, Kind, VllmProcess
from tests.contract.policies import write_policy
from tests.contract.subject import Subject, children
from tests.rollout_servers.engines.mortal import DEADLINE_S, until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("vllm_environment"),
    NEEDS_VLLM,
    VLLM_WARNINGS,
]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # vLLM leaves its sockets to the garbage collector
async def test_cancelled_start_leaves_no_process(tmp_path: Path) -> None:
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
    await asyncio.sleep(0)  # the loop drops it
    gc.collect()


async def test_late_start_is_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.rollout_servers.engines.vllm import core

    late, may_start = Mock(), threading.Event()

    def load(_: object) -> Mock:
        may_start.wait(DEADLINE_S)
        return late

    monkeypatch.setattr(core, "_load", load)
    monkeypatch.setattr(core, "_END_S", 0.01)
    with pytest.raises(EngineError, match=r"0\.01 s"):
        await core.load({}, deadline_s=0.01)
    assert not late.shutdown.called
    may_start.set()
    await until(lambda: late.shutdown.called)


async def test_engine_that_refuses_its_first_version_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.rollout_servers.engines.vllm import process

    core = Mock(set_version=AsyncMock(side_effect=UpdateFailed("vLLM failed")), close=AsyncMock())
    monkeypatch.setattr(process, "load", AsyncMock(return_value=Mock()))
    monkeypatch.setattr(process, "Core", lambda *_, **__: core)
    config = RunConfig.model_validate({"model": {"path": tmp_path}})
    with pytest.raises(UpdateFailed):
        await process.ProcessEngine.start(EngineSettings(config, tmp_path, eos_token_ids=()))
    core.close.assert_awaited_once()


def test_gauge_takes_all_calls_of_vllm_without_prometheus() -> None:
    from vllm.v1.metrics.loggers import ADMISSION_REASONS

    from slipstream.rollout_servers.engines.vllm.core import PressureGauge

    gauge = PressureGauge(None)
    gauge.log_engine_initialized()
    gauge.record_sleep_state(1, 2)
    for reason in ADMISSION_REASONS:
        gauge.record_admission_rejection(reason)
    assert (gauge.pressure.kv_cache_usage, gauge.pressure.preemptions) == (0.0, 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(prompt_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    """An engine that queues two requests; the last test leaves it dead."""
    kind = Kind(VllmProcess(), {"core": "process", "options": {"max_num_queued_reqs": 2}})
    subject = await Subject.start(kind, tmp_path_factory.mktemp("policy") / "model")
    yield subject
    await subject.close()


async def test_request_is_refused_when_the_queue_is_full(subject: Subject) -> None:
    running = asyncio.ensure_future(subject.answers(samples=2, max_tokens=100))
    await asyncio.sleep(0)  # it goes first
    with pytest.raises(RequestRefused):
        await subject.answers()
    assert [len(answer.token_ids) for answer in await running] == [100, 100]
    assert await subject.serves(0)


async def test_hanging_core_fails_pressure_and_requests(subject: Subject) -> None:
    waiting = await subject.begin(max_tokens=1000)
    (core,) = subject.engine._llm.engine_core.resources.engine_manager.processes
    psutil.Process(core.pid).send_signal(signal.SIGSTOP)
    subject.engine._core.deadline_s = 0.5
    async with asyncio.timeout(DEADLINE_S):
        for call in (subject.engine.pressure(), waiting):
            with pytest.raises(EngineError, match=r"0\.5 s"):
                await call
