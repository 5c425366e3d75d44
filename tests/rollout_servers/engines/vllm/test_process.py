"""What is AsyncLLM's own; what every engine must do is asked in tests/contract/test_engine.py."""

import asyncio
import importlib.util
import signal
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from slipstream.rollout_servers.engines.base import EngineError, RequestRefused
from tests.contract.engines import Kind, VllmProcess
from tests.contract.subject import Subject

DEADLINE_S = 60.0
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here"),
    # vLLM and what it imports warn of their own futures.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(prompt_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    """With room for two requests; the last test leaves it dead."""
    kind = Kind(VllmProcess(), {"core": "process", "options": {"max_num_queued_reqs": 2}})
    subject = await Subject.start(kind, tmp_path_factory.mktemp("policy") / "model")
    yield subject
    await subject.close()


async def test_a_request_that_finds_vllms_queue_full_is_refused_and_costs_nobody_else(subject: Subject) -> None:
    running = asyncio.ensure_future(subject.answers(samples=2, max_tokens=100))
    await asyncio.sleep(0)  # it goes first
    with pytest.raises(RequestRefused, match="cannot accept new requests"):
        await subject.answers()
    assert [len(answer.token_ids) for answer in await running] == [100, 100]
    assert await subject.serves(0)


async def test_a_core_that_hangs_is_found_dead_and_whoever_waits_for_an_answer_hears_of_it(subject: Subject) -> None:
    waiting = await subject.begin(max_tokens=1000)
    (core,) = subject.engine._llm.engine_core.resources.engine_manager.processes
    psutil.Process(core.pid).send_signal(signal.SIGSTOP)
    subject.engine._core.deadline_s = 0.5
    async with asyncio.timeout(DEADLINE_S):
        for call in (subject.engine.pressure(), waiting):
            with pytest.raises(EngineError, match=r"did not answer within 0\.5 s"):
                await call
