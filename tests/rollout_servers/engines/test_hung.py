"""Engines in a thread of the rollout server that never comes back from a step."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs import RunConfig
from slipstream.rollout_servers.engines.base import EngineError, Generation, UpdateFailed
from slipstream.rollout_servers.engines.hf.engine import HfEngine
from slipstream.rollout_servers.weights.staging import Staging
from tests.rollout_servers.engines.mortal import DEADLINE_S, MANIFEST, until

GENERATION = Generation(max_tokens=8, temperature=1.0, ignore_eos=True, stop_token_ids=())
# vLLM and what it imports warn of their own futures.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


class Hung:
    """In the place of what steps: takes requests on, and hangs."""

    def __init__(self) -> None:
        self.vocabulary, self.version, self.busy = 32, 0, False
        self.steps = threading.Event()

    @property
    def idle(self) -> bool:
        return not self.busy

    def add(self, *_: object) -> None:
        self.busy = True

    def step(self) -> list[Any]:
        self.steps.set()
        threading.Event().wait()
        return []


def hf_engine(hung: Hung, monkeypatch: pytest.MonkeyPatch) -> Any:
    def load(engine: Any) -> Hung:
        engine._vocabulary = hung.vocabulary
        return hung

    monkeypatch.setattr(HfEngine, "_load", load)
    return HfEngine


def inline_engine(hung: Hung, monkeypatch: pytest.MonkeyPatch) -> Any:
    from slipstream.rollout_servers.engines.vllm import inline

    monkeypatch.setattr(inline, "SteppedEngine", lambda _: hung)
    return inline.InlineEngine


@pytest.mark.parametrize("kind", [hf_engine, inline_engine])
@pytest.mark.usefixtures("vllm_environment")
async def test_an_engine_that_hangs_counts_as_dead_and_nobody_waits_for_its_end(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig.model_validate({"model": {"path": tmp_path}, "weights": {"deadline_s": 0.05}})
    hung = Hung()
    engine = await kind(hung, monkeypatch).start(config, tmp_path, GENERATION)
    asking = asyncio.ensure_future(engine.generate([3, 5], samples=2, greedy=False, deadline_s=DEADLINE_S))
    await until(hung.steps.is_set)
    staging = Staging("run", shared=False)
    staging.begin(MANIFEST)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineError, match=r"did not answer within 0\.1 s") as silence:
            await engine.install(MANIFEST, staging)
        assert not isinstance(silence.value, UpdateFailed)
        for call in (asking, engine.score([3, 5]), engine.pressure()):
            with pytest.raises(EngineError, match="did not answer"):
                await call

    # At the end of the process the loop waits for the threads of its executor.
    executor = ThreadPoolExecutor()
    monkeypatch.setattr(executor, "submit", lambda *_: pytest.fail("the loop would wait for this"))
    asyncio.get_running_loop().set_default_executor(executor)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await engine.close()
