"""vLLM's AsyncLLM started in time; otherwise what it has started by then is ended."""

import asyncio
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Any

from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from slipstream.configs.background import in_background
from slipstream.rollout_servers.engines.base import EngineError
from slipstream.rollout_servers.engines.vllm.gauge import PressureGauge

CORE = "EngineCore"
"""What vLLM calls the processes of its engine core."""
_END_S = 10.0
"""How long vLLM may take to notice that the core it waits for was killed."""
_KILL_EVERY_S = 0.05


async def load(arguments: dict[str, Any], *, deadline_s: float) -> AsyncLLM:
    """Raises: EngineError when vLLM does not start, or takes longer than `deadline_s`."""
    others = set(active_children())
    loading = in_background(_load, arguments)
    try:
        done, _ = await asyncio.wait({loading}, timeout=deadline_s)
    except asyncio.CancelledError:
        await _end(loading, others)
        raise
    if not done:
        await _end(loading, others)
        raise EngineError(f"vLLM did not start within {deadline_s:g} s")
    try:
        llm: AsyncLLM = loading.result()
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(f"vLLM did not start: {error!r}") from error
    return llm


def _load(arguments: dict[str, Any]) -> AsyncLLM:
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[PressureGauge])


async def _end(loading: "asyncio.Future[AsyncLLM]", others: set[BaseProcess]) -> None:
    """Kills the cores that appear while vLLM starts: without them it gives up."""
    until = asyncio.get_running_loop().time() + _END_S
    while not loading.done() and asyncio.get_running_loop().time() < until:
        for process in set(active_children()) - others:
            if process.name.startswith(CORE):
                process.kill()
        await asyncio.wait({loading}, timeout=_KILL_EVERY_S)
    loading.add_done_callback(_shut_down)


def _shut_down(loading: "asyncio.Future[AsyncLLM]") -> None:
    """For one that started all the same, too late."""
    if loading.exception() is None:
        in_background(loading.result().shutdown)
