"""AsyncLLM's engine core as its owners see it: calls with a deadline, the version, its death."""

import asyncio
import signal
from asyncio import FIRST_COMPLETED
from collections.abc import Coroutine
from multiprocessing.process import BaseProcess
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from slipstream.configs.background import in_background
from slipstream.rollout_servers.engines.base import EngineError, UpdateFailed
from slipstream.rollout_servers.engines.vllm.gauge import PressureGauge

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

    async def pause(self, *, clear_cache: bool) -> None:
        """Stops generation after the step that runs; requests stay. Raises: UpdateFailed, EngineError."""
        try:
            # Not `AsyncLLM.pause_generation`: it sleeps for 20 ms afterwards, to be tidy.
            with self.gauge.forgiving():
                await self.call(self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache))
        except UpdateFailed:
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
        await in_background(self.llm.shutdown)
        resources: Any = self.llm.engine_core.resources
        # vLLM kills those that hang, and does not wait for that.
        for process in self._processes:
            await in_background(process.join, REAP_S)
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
