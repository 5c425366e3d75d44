"""What is AsyncLLM's own; what every engine must do is asked in tests/contract/test_engine.py."""

import asyncio
import importlib.util
from pathlib import Path

import pytest

from slipstream.rollout_servers.engines.base import RequestRefused
from tests.contract.engines import Kind, VllmProcess
from tests.contract.subject import Subject

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here"),
    # vLLM and what it imports warn of their own futures.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


async def test_a_request_that_finds_vllms_queue_full_is_refused_and_costs_nobody_else(tmp_path: Path) -> None:
    kind = Kind(VllmProcess(), {"core": "process", "options": {"max_num_queued_reqs": 2}})
    subject = await Subject.start(kind, tmp_path / "model")
    try:
        running = asyncio.ensure_future(subject.answers(samples=2, max_tokens=100))
        await asyncio.sleep(0)  # it goes first
        with pytest.raises(RequestRefused, match="cannot accept new requests"):
            await subject.answers()
        assert [len(answer.token_ids) for answer in await running] == [100, 100]
        assert await subject.serves(0)
    finally:
        await subject.close()
