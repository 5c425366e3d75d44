"""vLLM with its model split over two workers, here on a CPU. Each of them imports vLLM, so a start takes a minute."""

from pathlib import Path

import pytest

from slipstream.rollout_servers.engines.base import UpdateFailed
from slipstream.rollout_servers.weights.verify import verify
from tests.contract.engines import NEEDS_VLLM, VLLM_WARNINGS, Kind, VllmProcess
from tests.contract.subject import PROMPT, Subject, children

pytestmark = [pytest.mark.soak, NEEDS_VLLM, VLLM_WARNINGS]


async def test_workers_load_their_shards_after_an_unreadable_version(tmp_path: Path) -> None:
    before = {process.pid for process in children()}
    kind = Kind(VllmProcess(), {"core": "process", "options": {"tensor_parallel_size": 2}})
    subject = await Subject.start(kind, tmp_path / "model")
    try:
        assert await subject.serves(0)
        unreadable = subject.trainer.stage()
        subject.trainer.staging.path.unlink()
        with pytest.raises(UpdateFailed, match="can't read version 1"):
            await subject.engine.install(unreadable.version, unreadable, subject.trainer.staging)
        subject.trainer.staging.abandon()
        for version in (1, 2):
            manifest = subject.trainer.stage(probe=PROMPT)
            await subject.engine.install(manifest.version, manifest, subject.trainer.staging)
            assert await subject.serves(version)
            await verify(subject.engine, manifest, subject.config.weights, dtype=subject.config.model.dtype_here)
    finally:
        await subject.close()
    assert not [process for process in children() if process.pid not in before]
