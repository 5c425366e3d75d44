"""AsyncLLM's engine core as its owners see it: calls with a deadline, the version, its death."""

import asyncio
import gc
import os
import signal
import threading
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from multiprocessing import active_children, parent_process
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from slipstream.configs.runtime.processes import die_with
from slipstream.configs.runtime.threads import run_in_thread
from slipstream.rollout_servers.engines.base import EngineError, UpdateFailed
from slipstream.rollout_servers.engines.vllm.convert import PressureGauge

REAP_S = 10.0


class Core:
    """The engine core in its process.

    Attributes:
        llm: vLLM's client of it.
        gauge: how close it is to its limits.
        version: the policy version that new tokens come from.
        deadline_s: how long it may take to answer; then it counts as dead.
    """

    def __init__(self, llm: AsyncLLM, *, deadline_s: float) -> None:
        self.llm = llm
        self.gauge = PressureGauge.of(llm)
        self.version = 0
        self.deadline_s = deadline_s
        self._death: str | None = None
        resources: Any = llm.engine_core.resources
        self._processes: list[BaseProcess] = resources.engine_manager.processes
        # Now and not with the first request: its end is how a death is heard of.
        llm._run_output_handler()
        assert llm.output_handler is not None, "started above"
        self._listening = llm.output_handler
        self._listening.add_done_callback(lambda _: self._note_death(self._ending()))

    async def call(self, call: Coroutine[Any, Any, Any]) -> Any:
        """What vLLM answers. Raises: UpdateFailed when it could not do it, EngineError when it is dead or silent."""
        if self._death is not None:
            call.close()
            raise EngineError(self._death)
        calling = asyncio.ensure_future(call)
        try:
            # A call that waits for a dead process never ends by itself.
            await asyncio.wait({calling, self._listening}, timeout=self.deadline_s, return_when=FIRST_COMPLETED)
            if calling.done():
                return calling.result()
        except EngineDeadError as error:
            raise self.death(self._ending()) from error
        except Exception as error:
            raise UpdateFailed(f"vLLM failed: {error!r}") from error
        finally:
            calling.cancel()
        silence = f"vLLM's engine core did not answer within {self.deadline_s:g} s"
        raise self.death(self._ending() if self._listening.done() else silence)

    async def rpc(self, method: str, *arguments: object) -> list[Any]:
        """Calls a method of every worker; returns what each of them returns. Raises: UpdateFailed, EngineError."""
        returned: list[Any] = await self.call(self.llm.collective_rpc(method, args=arguments))
        return returned

    @asynccontextmanager
    async def all_or_death(self, version: int) -> AsyncIterator[None]:
        """Declares the engine dead when the body, which installs `version`, fails or is cancelled.

        Raises: EngineError.
        """
        try:
            yield
        except UpdateFailed as error:
            raise self.death(f"vLLM is left with half of version {version}: {error}") from error
        except asyncio.CancelledError:
            self.death(f"vLLM may be left with half of version {version}: the update was cancelled")
            raise

    async def pause(self, *, clear_cache: bool) -> None:
        """Stops generation after the step that runs; requests stay. Raises: UpdateFailed, EngineError."""
        try:
            # Not `AsyncLLM.pause_generation`: it sleeps for 20 ms afterwards, to be tidy.
            with self.gauge.forgiving():
                await self.call(self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache))
        except (UpdateFailed, asyncio.CancelledError):
            await self.resume()
            raise

    async def resume(self) -> None:
        """Generation goes on. Raises: UpdateFailed, EngineError."""
        await self.call(self.llm.resume_generation())

    async def set_version(self, version: int) -> None:
        """Which version new tokens are stamped with. Raises: UpdateFailed, EngineError."""
        await self.call(self.llm.update_weight_version(str(version)))
        self.version = version

    def death(self, reason: str) -> EngineError:
        """Declares the engine dead: all who wait for answers hear of it. The error is the caller's to raise."""
        self._note_death(reason)
        return EngineError(reason)

    def reason(self, error: Exception) -> str:
        """Why a request was not answered.

        vLLM's own word for a dead core promises a traceback, which there is not when the kernel has killed it for want
        of memory.
        """
        if isinstance(error, EngineDeadError):
            return self._ending()
        return str(error) if isinstance(error, EngineError) else f"vLLM died: {error!r}"

    def check_alive(self) -> None:
        """Raises: EngineError when the engine is dead."""
        if self._death is not None:
            raise EngineError(self._death)

    async def close(self) -> None:
        """Ends the engine's processes; whoever still waits hears of it."""
        # First: vLLM would log the death that we are about to cause as an error.
        self._note_death("vLLM was closed")
        self._listening.cancel()
        await run_in_thread(self.llm.shutdown)
        resources: Any = self.llm.engine_core.resources
        # vLLM kills those that hang, and does not wait for that.
        for process in self._processes:
            await run_in_thread(process.join, REAP_S)
        # It leaves this to the garbage collector.
        for socket in (resources.input_socket, resources.output_socket):
            socket.close(linger=0)
        resources.ctx.term()

    def _ending(self) -> str:
        (process,) = self._processes
        if process.exitcode is None or process.exitcode >= 0:
            return "vLLM's engine core died; its log says why"
        return f"vLLM's engine core (process {process.pid}) was ended by {signal.Signals(-process.exitcode).name}"

    def _note_death(self, reason: str) -> None:
        if self._death is None:
            self._death = reason
            self.llm.output_processor.propagate_error(EngineError(reason))


CORE = "EngineCore"
"""What vLLM calls the processes of its engine core."""
_END_S = 10.0
"""How long vLLM may take to notice that the core it waits for was killed."""
_KILL_EVERY_S = 0.05


async def load(arguments: dict[str, Any], *, deadline_s: float) -> AsyncLLM:
    """Raises: EngineError when vLLM does not start, or takes longer than `deadline_s`."""
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
    """For one that started all the same, too late."""
    if loading.exception() is None:
        run_in_thread(loading.result().shutdown)


def end_without_collecting() -> None:
    """From SIGTERM on this process collects no garbage, if vLLM has it to itself.

    vLLM collects as it ends, twice, and so does Python, through all that was loaded: that took 2 to 4 s, and after 5 s
    vLLM kills its core.
    """
    of_vllm = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(of_vllm):
        return  # a rollout server, which has vLLM in a thread

    def end(number: int, frame: FrameType | None) -> None:
        gc.callbacks.append(lambda phase, info: gc.freeze())
        of_vllm(number, frame)

    signal.signal(signal.SIGTERM, end)


_SERVER = "SLIPSTREAM_ROLLOUT_SERVER"


def claim_children() -> None:
    """Whatever this process starts from now on, and calls `end_with_server`, ends with it."""
    os.environ[_SERVER] = str(os.getpid())


def end_with_server() -> None:
    """Kills this worker of vLLM, and the engine core that started it, once the server that claimed them has ended."""
    server = int(os.environ.get(_SERVER, os.getpid()))
    starter = parent_process()
    if server != os.getpid() and starter is not None:
        # With tensor parallelism the starter is the core; without, this process is the core.
        die_with(server, starter=starter.pid if starter.pid != server else None)
