"""The engines that the contract holds for, and how to look into each of them."""

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import psutil
import pytest

SGLANG_PYTHON = "SLIPSTREAM_SGLANG_PYTHON"
"""The variable that names the Python of an environment with SGLang, which is checked only where there is one."""
BUG = "the model runner met a bug"
NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here")
# vLLM, and what it imports, warn of their own futures.
VLLM_WARNINGS = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
# SGLang keeps room for so many more tokens of each answer: with its 4,096 the long ones of the tests would take turns.
os.environ.setdefault("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "128")


class Adapter(Protocol):
    """What a test may know of an engine's inside."""

    @property
    def leave_head_behind(self) -> Callable[[pytest.MonkeyPatch], None] | None:
        """Makes updates leave a tied head at its old weights, while patched; None where that can't be done."""
        ...

    async def busy(self, engine: Any) -> bool:
        """Whether anything is left to do for it, or is kept of requests that are done with."""
        ...

    async def kill(self, engine: Any) -> None:
        """Makes it die of something that nobody can foresee."""
        ...


def _forget_to_tie(patches: pytest.MonkeyPatch) -> None:
    patches.setattr("slipstream.rollout_servers.engines.vllm.worker.tie_head", lambda model: None)


class VllmInline:
    """vLLM in a thread of this process."""

    leave_head_behind = staticmethod(_forget_to_tie)

    async def busy(self, engine: Any) -> bool:
        """Asks the scheduler, and looks into the output processor."""
        llm = engine._stepped.llm
        return llm.engine_core.engine_core.scheduler.has_unfinished_requests() or _kept(llm.output_processor)

    async def kill(self, engine: Any) -> None:
        """The next step fails."""

        def fail() -> None:
            raise RuntimeError(BUG)

        engine._stepped.llm.step = fail


class VllmProcess:
    """vLLM with its core in another process."""

    leave_head_behind = None

    async def busy(self, engine: Any) -> bool:
        """Asks the core, and looks into the output processor."""
        return await engine._llm.engine_core.call_utility_async("has_work") or _kept(engine._llm.output_processor)

    async def kill(self, engine: Any) -> None:
        """SIGKILL to the core's process."""
        (core,) = engine._llm.engine_core.resources.engine_manager.processes
        psutil.Process(core.pid).kill()


class Sglang:
    """SGLang's own HTTP server, in a process of its own with its scheduler in another."""

    leave_head_behind = None

    async def busy(self, engine: Any) -> bool:
        """Asks the server how many requests run or wait."""
        loads = json.loads(await engine._calls.get("/v1/loads"))["loads"]
        return any(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    async def kill(self, engine: Any) -> None:
        """SIGKILL to the scheduler's process."""
        children = psutil.Process(engine.server.pid).children(recursive=True)
        (scheduler,) = [child for child in children if "scheduler" in " ".join(child.cmdline())]
        scheduler.kill()


class Hf:
    """transformers in a thread of this process."""

    leave_head_behind = None

    async def busy(self, engine: Any) -> bool:
        """Asks whether tokens lie in its KV cache, or somebody waits."""
        return (await engine.pressure()).kv_cache_usage > 0 or bool(engine._thread._requests)

    async def kill(self, engine: Any) -> None:
        """What comes between the next two steps fails."""

        def fail() -> None:
            raise RuntimeError(BUG)

        engine._thread._commands.put(fail)


@dataclass(frozen=True)
class Kind:
    """An engine as the contract's tests start it.

    Attributes:
        options: the configuration's section `rollout.engine`, beside what is the same for all.
        tied: whether the policy's head is tied to its embedding.
        preempts: whether it takes on more than its KV cache has room for.
        scores_first: whether a text that is scored goes before answers that wait.
        dies_of: what is said of its death by `Adapter.kill`, as a pattern; None where that may be anything.
        exact: mean |Δ| of log-probs within which it agrees with transformers.
        keeps_prefixes: whether prompts find those of earlier requests in its KV cache.
        installed: whether this environment has it.
    """

    adapter: Adapter
    options: Mapping[str, object] = field(default_factory=dict)
    tied: bool = True
    preempts: bool = True
    scores_first: bool = True
    dies_of: str | None = None
    exact: float = 1e-4
    keeps_prefixes: bool = True
    installed: Callable[[], bool] = lambda: True


def _has(module: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(module) is not None


ENGINES: dict[str, Kind] = {
    "vllm-inline": Kind(VllmInline(), {"core": "inline"}, dies_of=BUG, installed=_has("vllm")),
    # Inline and here the same worker loads the weights, tied or not.
    "vllm-process": Kind(
        VllmProcess(),
        {"core": "process"},
        tied=False,
        dies_of=r"engine core \(process \d+\) was ended by SIGKILL",
        installed=_has("vllm"),
    ),
    "hf": Kind(Hf(), {"name": "hf"}, dies_of=BUG, keeps_prefixes=False),
    "sglang": Kind(
        Sglang(),
        {
            "name": "sglang",
            "python": os.environ.get(SGLANG_PYTHON),
            "kv_cache_bytes": 2_200_000,  # of 4,296 tokens, just enough for one whole context
        },
        scores_first=False,
        installed=lambda: SGLANG_PYTHON in os.environ,
    ),
}


def _kept(processor: Any) -> bool:
    return bool(processor.request_states or processor.parent_requests or processor.external_req_ids)
