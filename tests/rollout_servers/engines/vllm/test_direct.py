"""Versions go straight into a real vLLM, by its own transfer engine and the learner's transport.

Only NCCL and CUDA are missing here: gloo takes their place (`over_gloo`).
"""

import asyncio
import gc
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from slipstream.learner.weights.broadcast import NcclTransport
from tests.contract.engines import NEEDS_VLLM, VLLM_WARNINGS
from tests.rollout_servers.engines.direct import Run, broken_off_half_way, published_while_it_generates, run
from tests.rollout_servers.engines.vllm.over_gloo import Communicators, put_in_nccls_place

pytestmark = [NEEDS_VLLM, VLLM_WARNINGS, pytest.mark.usefixtures("vllm_environment", "prompt_vllm")]
ROOT = Path(__file__).parents[4]
NCCL = "slipstream.learner.weights.broadcast"
WORKER = "tests.rollout_servers.engines.vllm.worker_over_gloo.StagedWorker"


@pytest.fixture
def communicators(monkeypatch: pytest.MonkeyPatch) -> Communicators:
    communicators = Communicators()
    put_in_nccls_place(monkeypatch.setattr)
    monkeypatch.syspath_prepend(ROOT)  # vLLM's processes import WORKER
    monkeypatch.setattr(f"{NCCL}.new_id", communicators.new_id)
    monkeypatch.setattr(f"{NCCL}.communicator", communicators.of_rank_0)
    monkeypatch.setattr("slipstream.rollout_servers.engines.vllm.process.uses_nccl", lambda weights, gpu: True)
    return communicators


def over_nccl(folder: Path, *, deadline_s: float = 60.0, **options: Any) -> AbstractAsyncContextManager[Run]:
    """`options` are vLLM's."""
    options = {"worker_extension_cls": WORKER, **options}
    engine = {"core": "process", "kv_cache_bytes": 4 << 20, "options": options}
    return run(folder, NcclTransport, engine, deadline_s=deadline_s)


async def test_versions_are_broadcast_until_one_breaks_off(tmp_path: Path, communicators: Communicators) -> None:
    unlooked_at: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unlooked_at.append(context))
    async with over_nccl(tmp_path, deadline_s=20.0) as at, at.server("server-1") as engine:
        await published_while_it_generates(at, engine, communicators.made, tokens=900)
        await broken_off_half_way(at, engine, communicators.made)
    gc.collect()
    assert unlooked_at == []


@pytest.mark.soak
async def test_group_changes_with_the_servers(tmp_path: Path, communicators: Communicators) -> None:
    async with over_nccl(tmp_path, tensor_parallel_size=2) as at, at.server("server-1") as engine:
        await at.publish(1)
        async with at.server("server-2") as other:
            for version in (2, 3):
                await at.publish(version)
                assert (engine.version, other.version) == (version, version)
        await at.publish(4)
        assert engine.version == 4
        figures = at.publisher.metrics
        # Whoever comes late fetches the version of then.
        assert (len(communicators.made), len(figures.deviations), figures.evictions) == (3, 7, 0)
