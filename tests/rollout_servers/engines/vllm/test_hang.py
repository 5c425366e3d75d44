"""An engine that hangs: asking for its pressure, as a server does all the time, finds that out.

Of a core in a process of its own: test_process.py.
"""

import asyncio
import importlib.util
import signal
import threading
from pathlib import Path

import psutil
import pytest

from slipstream.rollout_servers.engines.base import EngineError
from slipstream.rollout_servers.engines.http import server as launch
from tests.contract.engines import Kind, VllmInline, VllmServer
from tests.contract.subject import Subject

DEADLINE_S = 60.0
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here"),
    # vLLM and what it imports warn of their own futures.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


async def test_a_core_that_hangs_behind_a_server_that_does_not_is_found_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.1)  # the server waits for its core as it ends
    subject = await Subject.start(Kind(VllmServer(), {"core": "server"}), tmp_path / "model")
    engine = subject.engine
    try:
        await engine.pressure()
        children = psutil.Process(engine.server.pid).children(recursive=True)
        (core,) = [child for child in children if "EngineCore" in child.cmdline()[0]]
        core.send_signal(signal.SIGSTOP)
        engine._calls.deadline_s = 0.5
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(EngineError, match=r"did not answer within 0\.5 s"):
                await engine.pressure()
            with pytest.raises(EngineError, match=r"did not answer within 0\.5 s"):
                await subject.answers()
    finally:
        await subject.close()


async def test_a_thread_that_hangs_in_a_step_is_found_dead_and_whoever_waits_for_an_answer_hears_of_it(
    tmp_path: Path,
) -> None:
    subject = await Subject.start(Kind(VllmInline(), {"core": "inline"}), tmp_path / "model")
    engine, hangs, goes_on = subject.engine, threading.Event(), threading.Event()
    step = engine._stepped.llm.step

    def hang() -> object:
        hangs.set()
        goes_on.wait(DEADLINE_S)
        return step()

    try:
        engine._stepped.llm.step = hang
        waiting = asyncio.ensure_future(subject.answers())
        await asyncio.to_thread(hangs.wait, DEADLINE_S)
        engine._thread._deadline_s = 0.5
        async with asyncio.timeout(DEADLINE_S):
            for call in (engine.pressure(), waiting):
                with pytest.raises(EngineError, match=r"did not answer within 0\.5 s"):
                    await call
    finally:
        goes_on.set()
        await subject.close()
