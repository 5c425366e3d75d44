"""Detection of a hanging engine thread; for a core in a process of its own see test_process.py."""

import asyncio
import importlib.util
import threading
from pathlib import Path

import pytest

from slipstream.rollout_servers.engines.base import EngineError
from tests.contract.engines import Kind, VllmInline
from tests.contract.subject import Subject

DEADLINE_S = 60.0
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here"),
    # vLLM and what it imports warn of their own futures.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


async def test_hanging_step_fails_pressure_and_requests(tmp_path: Path) -> None:
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
