"""AsyncLLM's engine core in another process: start, calls with a deadline, load, crash detection, shutdown."""

import asyncio
import signal
import time
from asyncio import FIRST_COMPLETED
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Any, Self

from vllm import AsyncEngineArgs
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import PrometheusStatLogger

from slipstream.configs.runtime.threads import run_in_thread
from slipstream.rollout_servers.engines.base import EngineError, Pressure, UpdateFailed


class PressureGauge(PrometheusStatLogger):
    """The load after the last step. It replaces vLLM's Prometheus logger, which is not read here.

    vLLM adds a Prometheus logger to every logger that is not derived from it.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        """Skips the base class's, which registers a hundred metrics. So each method that vLLM calls is overridden."""
        self._usage = 0.0
        self._running = self._waiting = self._preemptions = 0
        # A request reports its preemption when it continues, which may be after the next update.
        self._updates: deque[tuple[float, float]] = deque(maxlen=100)

    @classmethod
    def of(cls, llm: AsyncLLM) -> Self:
        """The gauge of an engine; before its first request."""
        assert llm.logger_manager is not None, "vLLM makes one when it is given a logger"
        (gauge,) = llm.logger_manager.stat_loggers
        assert isinstance(gauge, cls), "it replaces the Prometheus logger"
        # The core still reports; but statistics of every token would cost this process half as much time again.
        llm.log_stats = llm.output_processor.log_stats = False
        processor: Any = llm.output_processor
        processor._update_stats_from_output = gauge._count_preemptions
        return gauge

    @property
    def pressure(self) -> Pressure:
        """The load after the last step."""
        return Pressure(self._usage, self._preemptions, self._running, self._waiting)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Context of an update, whose preemptions are not counted."""
        started_at = time.monotonic()  # one clock for all processes, on Linux
        yield
        self._updates.append((started_at, time.monotonic()))

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Called by vLLM after every step."""
        if scheduler_stats is not None:
            self._usage = scheduler_stats.kv_cache_usage
            self._running, self._waiting = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs

    def record_admission_rejection(self, reason: str) -> None:
        """Called by vLLM when its queue is full; the request raises that too."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Called by vLLM when the engine sleeps, which it does not here."""

    def log_engine_initialized(self) -> None:
        """Called by vLLM at the start."""

    def _count_preemptions(self, state: Any, output: Any, timestamp: Any, iteration_stats: Any) -> None:
        """Called by vLLM for every request that a step generated tokens for."""
        for event in output.events or ():
            if event.type is EngineCoreEventType.PREEMPTED and not self._in_update(event.timestamp):
                self._preemptions += 1

    def _in_update(self, preempted_at: float) -> bool:
        return any(start <= preempted_at <= end for start, end in self._updates)


REAP_S = 10.0


class Core:
    """The engine core in its process.

    Attributes:
        llm: vLLM's client of the core.
        gauge: its load.
        version: the policy version of new tokens.
        deadline_s: time limit of a call; the core counts as crashed after it.
    """

    def __init__(self, llm: AsyncLLM, *, deadline_s: float) -> None:
        self.llm = llm
        self.gauge = PressureGauge.of(llm)
        self.version = 0
        self.deadline_s = deadline_s
        self._crash: str | None = None
        resources: Any = llm.engine_core.resources
        self._processes: list[BaseProcess] = resources.engine_manager.processes
        # Now, not with the first request: its end reveals a crash.
        llm._run_output_handler()
        assert llm.output_handler is not None, "started above"
        self._listening = llm.output_handler
        self._listening.add_done_callback(lambda _: self.crashed(self._exit_reason()))

    async def call(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Awaits a call of vLLM. Raises: UpdateFailed when it fails, EngineError when the core crashes or hangs."""
        if self._crash is not None:
            call.close()
            raise EngineError(self._crash)
        calling = asyncio.ensure_future(call)
        try:
            # A call to a dead process never ends by itself.
            await asyncio.wait({calling, self._listening}, timeout=self.deadline_s, return_when=FIRST_COMPLETED)
            if calling.done():
                return calling.result()
        except EngineDeadError as error:
            raise self.crashed(self._exit_reason()) from error
        except Exception as error:  # vLLM raises anything; the reason is passed on
            raise UpdateFailed(f"vLLM failed: {error!r}") from error
        finally:
            calling.cancel()
        silence = f"vLLM's engine core did not answer within {self.deadline_s:g} s"
        raise self.crashed(self._exit_reason() if self._listening.done() else silence)

    async def rpc(self, method: str, *arguments: object) -> list[Any]:
        """Results of a method that every worker runs. Raises: UpdateFailed, EngineError."""
        returned: list[Any] = await self.call(self.llm.collective_rpc(method, args=arguments))
        return returned

    async def pause(self, *, clear_cache: bool) -> None:
        """Pauses generation after the current step; requests stay. Raises: UpdateFailed, EngineError."""
        try:
            # Not `AsyncLLM.pause_generation`: it sleeps for 20 ms afterwards.
            with self.gauge.update():
                await self.call(self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache))
            if not clear_cache and self.llm.model_config.is_multimodal_model:
                await self.call(self.llm.reset_encoder_cache())  # else it is part of the caches
        except (UpdateFailed, asyncio.CancelledError):
            await self.call(self.llm.resume_generation())
            raise

    @asynccontextmanager
    async def update(self, version: int) -> AsyncIterator[None]:
        """Resumes generation with `version` after the body has changed the weights of a paused engine.

        Raises: EngineError when any of it fails or is cancelled: the core then counts as crashed.
        """
        try:
            yield
            await self.set_version(version)
            await self.call(self.llm.resume_generation())
        except UpdateFailed as error:
            raise self.crashed(f"vLLM is left with half of version {version}: {error}") from error
        except asyncio.CancelledError:
            self.crashed(f"vLLM may be left with half of version {version}: the update was cancelled")
            raise

    async def set_version(self, version: int) -> None:
        """Sets the policy version of new tokens. Raises: UpdateFailed, EngineError."""
        await self.call(self.llm.update_weight_version(str(version)))
        self.version = version

    def crashed(self, reason: str) -> EngineError:
        """Declares a crash: all requests fail. Returns the error for the caller."""
        if self._crash is None:
            self._crash = reason
            self.llm.output_processor.propagate_error(EngineError(reason))
        return EngineError(reason)

    def reason(self, error: Exception) -> str:
        """Reason of a failed request.

        vLLM's own message for a dead core refers to a traceback, which is missing when the kernel killed it for want of
        memory.
        """
        if isinstance(error, EngineDeadError):
            return self._exit_reason()
        return str(error) if isinstance(error, EngineError) else f"vLLM crashed: {error!r}"

    def check_alive(self) -> None:
        """Raises: EngineError when the core has crashed."""
        if self._crash is not None:
            raise EngineError(self._crash)

    async def close(self) -> None:
        """Ends the engine's processes; pending requests and calls fail."""
        # First: vLLM would log the exit as an error.
        self.crashed("vLLM was closed")
        self._listening.cancel()
        await run_in_thread(self.llm.shutdown)
        resources: Any = self.llm.engine_core.resources
        # vLLM kills processes that hang, without waiting for their end.
        for process in self._processes:
            await run_in_thread(process.join, REAP_S)
        # vLLM leaves these to the garbage collector.
        for socket in (resources.input_socket, resources.output_socket):
            socket.close(linger=0)
        resources.ctx.term()

    def _exit_reason(self) -> str:
        (process,) = self._processes
        if process.exitcode is None or process.exitcode >= 0:
            return "vLLM's engine core crashed; its log has the reason"
        return f"vLLM's engine core (process {process.pid}) was ended by {signal.Signals(-process.exitcode).name}"


CORE = "EngineCore"
"""vLLM's name for the processes of its engine core."""
_END_S = 10.0
"""Time for vLLM to notice that the core was killed while it waits for it."""
_KILL_EVERY_S = 0.05


async def load(arguments: dict[str, Any], *, deadline_s: float) -> AsyncLLM:
    """Starts vLLM. Raises: EngineError when it fails, or takes longer than `deadline_s`."""
    others = set(active_children())
    loading = run_in_thread(_load, arguments)
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
    """Ends an engine that started too late."""
    if loading.exception() is None:
        run_in_thread(loading.result().shutdown)
