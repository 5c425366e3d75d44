"""vLLM's engine stepped in a thread of the rollout server: no serialisation between server and engine core."""

import asyncio
import gc
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import RequestOutputCollector

from slipstream.buffer.wire.weights import Form, Manifest
from slipstream.configs.logs import get_log
from slipstream.rollout_servers.engines.base import Completion, EngineError, RequestRefused, UpdateFailed
from slipstream.rollout_servers.engines.vllm.arguments import Generation
from slipstream.rollout_servers.engines.vllm.convert import (
    completions,
    join_info,
    sampling_params,
    token_prompt,
    update_info,
)

log = get_log("rollout.vllm")

Command = Callable[[], None]


class InlineEngine:
    """vLLM in one engine thread. Whatever touches the engine runs there, between two steps.

    Attributes:
        generation: how answers are drawn from now on.
    """

    def __init__(self, arguments: dict[str, Any], generation: Generation, *, bucket_bytes: int) -> None:
        self._arguments = arguments
        self.generation = generation
        self._bucket_bytes = bucket_bytes
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._running: dict[str, asyncio.Future[list[Completion]]] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._death: EngineError | None = None
        self._request_numbers = itertools.count()
        self._version = 0
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @classmethod
    async def start(
        cls, arguments: dict[str, Any], generation: Generation, *, bucket_bytes: int, deadline_s: float
    ) -> "InlineEngine":
        """Loads the model. Raises: EngineError when that fails or takes longer than `deadline_s`."""
        engine = cls(arguments, generation, bucket_bytes=bucket_bytes)
        engine._thread.start()
        try:
            async with asyncio.timeout(deadline_s):
                await engine._started
        except TimeoutError:
            raise EngineError(f"vLLM did not start within {deadline_s:.0f} s") from None
        return engine

    @property
    def version(self) -> int:
        """The policy version that new tokens come from."""
        return self._version

    @property
    def workers(self) -> int:
        """The engine runs in one worker."""
        return 1

    async def generate(
        self, prompt_ids: Sequence[int], *, samples: int, greedy: bool, deadline_s: float
    ) -> list[Completion]:
        """`samples` answers to one prompt; those that are not finished at the deadline are cut short.

        Cancelling aborts them all. Raises: RequestRefused, EngineError.
        """
        self._check_alive()
        prompt = token_prompt(prompt_ids, vocabulary=self._vocabulary)
        params = sampling_params(self.generation, samples=samples, greedy=greedy)
        request = str(next(self._request_numbers))
        answers: asyncio.Future[list[Completion]] = self._loop.create_future()
        self._running[request] = answers
        self._commands.put(lambda: self._add(request, prompt, params))
        cut = self._loop.call_later(deadline_s, self._commands.put, lambda: self._cut_short(request))
        try:
            return await answers
        except asyncio.CancelledError:
            self._commands.put(lambda: self._cut_short(request))
            raise
        finally:
            cut.cancel()
            self._running.pop(request, None)

    async def join(self, group: Form) -> None:
        """Enters a transfer group in the background."""
        info = join_info(group, bucket_bytes=self._bucket_bytes)
        await self._call(lambda: self._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": info}))

    async def receive(self, manifest: Manifest) -> None:
        """Starts to receive a version in the background."""
        info = update_info(manifest, "gloo")
        await self._call(lambda: self._llm.collective_rpc("stage_weights", kwargs={"update_info": info}))

    async def apply(self, manifest: Manifest) -> float:
        """Makes a received version the one that generates; returns seconds that generation stood still."""
        stall_s: float = await self._call(lambda: self._apply(manifest))
        self._version = manifest.version
        return stall_s

    async def close(self) -> None:
        """Ends the engine thread."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    # --- in the engine thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._llm = LLMEngine.from_engine_args(EngineArgs(**self._arguments))
            self._vocabulary = self._llm.model_config.get_vocab_size()
            self._llm.set_weight_version("0")
            # What was loaded stays: the collector need not walk through it again at every step.
            gc.collect()
            gc.freeze()
        except Exception as error:  # noqa: BLE001  (whatever vLLM raises at start must reach the waiting server)
            self._tell(self._started.set_exception, EngineError(f"vLLM did not start: {error!r}"))
            return
        self._tell(self._started.set_result, None)
        try:
            self._serve()
        except Exception as error:
            log.exception("engine died")
            self._tell(self._die, EngineError(f"vLLM died: {error!r}"))
        finally:
            self._llm.engine_core.shutdown()

    def _serve(self) -> None:
        while True:
            idle = not self._llm.has_unfinished_requests()
            while idle or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                command()
                idle = False
            finished = [output for output in self._llm.step() if output.finished]
            if finished:
                self._tell(self._resolve, finished)

    def _add(self, request: str, prompt: Any, params: Any) -> None:
        try:
            self._llm.add_request(request, prompt, params)
        except (VLLMClientError, ValueError) as error:  # vLLM's verdict on this one request; the engine lives on
            self._tell(self._fail, request, RequestRefused(f"vLLM refused a request: {error}"))

    def _cut_short(self, request: str) -> None:
        processor = self._llm.output_processor
        states = [processor.request_states[each] for each in processor.external_req_ids.get(request, ())]
        if not states:
            return  # it has finished
        # Under vLLM's own name for the whole request: under ours it would forget the samples and keep their parent.
        whole = states[0].parent_req or states[0]
        # vLLM tells what an aborted request came to only to those that have a queue.
        queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, whole.request_id)
        for state in states:
            state.queue = queue
        self._llm.abort_request([whole.request_id], internal=True)
        self._tell(self._resolve, [queue.get_nowait()])

    def _apply(self, manifest: Manifest) -> float:
        """Nothing steps while this runs, which is the pause; preempting the running requests drops their KV cache."""
        paused_at = time.perf_counter()
        self._llm.reset_prefix_cache(reset_running_requests=True)
        self._llm.collective_rpc("start_weight_update")
        try:
            self._llm.collective_rpc("update_weights", kwargs={"update_info": update_info(manifest, "gloo")})
            self._llm.collective_rpc("finish_weight_update")
        except Exception as error:
            raise EngineError(f"vLLM is left with half of version {manifest.version}: {error!r}") from error
        self._llm.set_weight_version(str(manifest.version))
        return time.perf_counter() - paused_at

    # --- between the two ------------------------------------------------------------------------------------------

    async def _call(self, function: Callable[[], Any]) -> Any:
        self._check_alive()
        result: asyncio.Future[Any] = self._loop.create_future()
        self._calls.add(result)

        def command() -> None:
            try:
                value = function()
            except EngineError:  # the end of the engine: its thread tells all who wait
                raise
            except Exception as error:  # noqa: BLE001  (raised again in the caller)
                self._tell(_set_exception, result, UpdateFailed(f"vLLM failed: {error!r}"))
            else:
                self._tell(_set_result, result, value)

        self._commands.put(command)
        try:
            return await result
        finally:
            self._calls.discard(result)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def _resolve(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            answers = self._running.get(output.request_id)
            if answers is not None:
                _set_result(answers, completions(output))

    def _fail(self, request: str, error: EngineError) -> None:
        answers = self._running.get(request)
        if answers is not None:
            _set_exception(answers, error)

    def _die(self, error: EngineError) -> None:
        self._death = error
        for waiting in (*self._running.values(), *self._calls):
            _set_exception(waiting, error)


def _set_result(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
