"""vLLM's engine stepped in a thread of the rollout server: no serialisation between server and engine core."""

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.outputs import RequestOutput

from slipstream.buffer.wire.weights import Manifest
from slipstream.configs.errors import ConfigError
from slipstream.configs.logs import get_log
from slipstream.configs.schema import RunConfig
from slipstream.rollout_servers.engines.base import (
    Completion,
    EngineError,
    Generation,
    Pressure,
    RequestRefused,
    UpdateFailed,
)
from slipstream.rollout_servers.engines.vllm.arguments import SCORED_FIRST, engine_arguments, has_gpu
from slipstream.rollout_servers.engines.vllm.convert import (
    completions,
    nothing,
    prompt_logprobs,
    sampling_params,
    scoring_params,
    token_prompt,
)
from slipstream.rollout_servers.engines.vllm.stepped import SteppedEngine
from slipstream.rollout_servers.weights.background import in_background
from slipstream.rollout_servers.weights.staging import Staging

log = get_log("rollout.vllm")

Command = Callable[[], None]


@dataclass(frozen=True)
class Asked:
    """A request that is not answered yet."""

    output: "asyncio.Future[RequestOutput]"
    samples: int


class InlineEngine:
    """vLLM in one engine thread. Whatever touches the engine runs there, between two steps.

    Attributes:
        generation: how answers are drawn from now on.
        shares_memory: no; the engine lives in this process.
        direct: there is none.
    """

    shares_memory = False
    direct = None

    def __init__(self, config: RunConfig, model: Path, generation: Generation) -> None:
        self.generation = generation
        self._arguments = engine_arguments(config, model, gpu=has_gpu())
        self._keep_stale_kv = config.weights.keep_stale_kv
        if self._keep_stale_kv:
            # Between two steps vLLM would be at the next tokens already, and stamp them with the version after theirs.
            self._arguments["async_scheduling"] = False
        self._deadline_s = 2 * config.weights.deadline_s
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._running: dict[str, Asked] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._death: str | None = None
        self._request_numbers = itertools.count()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @classmethod
    async def start(cls, config: RunConfig, model: Path, generation: Generation) -> Self:
        """Loads the model.

        Raises: ConfigError when the configuration asks for what this engine can't do; EngineError when it does not
        start, or takes longer than `rollout.engine.start_deadline_s`.
        """
        _check(config)
        engine = cls(config, model, generation)
        engine._thread.start()
        deadline_s = config.rollout.engine.start_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await engine._started
        except (TimeoutError, asyncio.CancelledError) as ended:
            engine._commands.put(None)
            if isinstance(ended, asyncio.CancelledError):
                raise
            raise EngineError(f"vLLM did not start within {deadline_s:.0f} s") from None
        return engine

    @property
    def version(self) -> int:
        """The policy version that new tokens come from."""
        return self._stepped.version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        samples: int,
        greedy: bool,
        deadline_s: float,
        max_tokens: int | None = None,
    ) -> list[Completion]:
        """`samples` answers to one prompt; those that are not finished at the deadline are cut short.

        Cancelling aborts them all. `max_tokens` takes the place of the configured one.

        Raises: RequestRefused, EngineError.
        """
        params = sampling_params(self.generation, samples=samples, greedy=greedy, max_tokens=max_tokens)
        return completions(await self._ask(prompt_ids, params, deadline_s=deadline_s))

    async def install(self, manifest: Manifest, staging: Staging) -> float:
        """Makes the staged version the one that generates; running requests go on, their KV cache is recomputed.

        With `weights.keep_stale_kv` it is not: the stall is shorter, but what the old weights made of the tokens so
        far stays in the cache, and the log-probs of all later tokens of these answers are then of neither version.

        Returns: seconds that generation stood still.
        Raises: UpdateFailed while the model is whole, EngineError once it is in pieces.
        """
        tensors = list(staging.named_tensors(manifest))
        keep = self._keep_stale_kv
        stall_s: float = await self._call(lambda: self._stepped.install(manifest.version, tensors, keep_stale_kv=keep))
        return stall_s

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """log-prob of each token but the first, given those before it, at temperature 1.

        Raises: RequestRefused, EngineError.
        """
        return prompt_logprobs(await self._ask(token_ids, scoring_params(), deadline_s=None, priority=SCORED_FIRST))

    async def checksums(self) -> None:
        """vLLM fuses and prepacks the tensors that it is given."""

    async def pressure(self) -> Pressure:
        """As of now; what an update preempts is not counted. Raises: EngineError."""
        if self._death is not None:
            raise EngineError(self._death)
        return self._stepped.pressure

    async def close(self) -> None:
        """Ends the engine thread and frees the model; whoever still waits hears of it."""
        self._commands.put(None)
        await in_background(self._thread.join)

    # --- in the engine thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            stepped = self._stepped = SteppedEngine(self._arguments)
        except Exception as error:  # noqa: BLE001  (whatever vLLM raises at start must reach the waiting server)
            self._tell(_set_exception, self._started, EngineError(f"vLLM did not start: {error!r}"))
            return
        self._tell(_set_result, self._started, None)
        reason = "vLLM was closed"
        try:
            self._serve(stepped)
        except Exception as error:
            log.exception("engine died")
            reason = f"vLLM died: {error!r}"
        left_behind: dict[str, list[Completion] | None] = {}
        try:
            left_behind = stepped.left_behind()
        finally:
            self._tell(self._die, reason, left_behind)
            stepped.close()

    def _serve(self, stepped: SteppedEngine) -> None:
        while True:
            idle = stepped.idle
            while idle or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                command()
                idle = False
            finished = stepped.step()
            if finished:
                self._tell(self._resolve, finished)

    def _add(self, request: str, prompt: Any, params: SamplingParams, priority: int) -> None:
        try:
            self._stepped.add(request, prompt, params, priority)
        except (VLLMClientError, ValueError) as error:  # vLLM's verdict on this one request; the engine lives on
            self._tell(self._fail, request, RequestRefused(f"vLLM refused a request: {error}"))

    def _cut_short(self, request: str) -> None:
        output = self._stepped.cut_short(request)
        if output is not None:
            self._tell(self._resolve, [output])

    # --- between the two ------------------------------------------------------------------------------------------

    async def _ask(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, deadline_s: float | None, priority: int = 0
    ) -> RequestOutput:
        if self._death is not None:
            raise EngineError(self._death, nothing(params.n))
        prompt = token_prompt(prompt_ids, vocabulary=self._stepped.vocabulary)
        request = str(next(self._request_numbers))
        asked = Asked(self._loop.create_future(), params.n)
        self._running[request] = asked
        self._commands.put(lambda: self._add(request, prompt, params, priority))

        def cut_short() -> None:
            self._commands.put(lambda: self._cut_short(request))

        cut = None if deadline_s is None else self._loop.call_later(deadline_s, cut_short)
        try:
            return await asked.output
        except asyncio.CancelledError:
            cut_short()
            raise
        finally:
            if cut is not None:
                cut.cancel()
            self._running.pop(request, None)

    async def _call(self, function: Callable[[], Any]) -> Any:
        """What the engine thread makes of it. Raises: UpdateFailed, EngineError when the engine is dead or silent."""
        if self._death is not None:
            raise EngineError(self._death)
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
            async with asyncio.timeout(self._deadline_s):
                return await result
        except TimeoutError:
            reason = f"vLLM did not answer within {self._deadline_s:g} s"
            self._die(reason, dict.fromkeys(self._running))
            raise EngineError(reason) from None
        finally:
            self._calls.discard(result)

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def _resolve(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            asked = self._running.get(output.request_id)
            if asked is not None:
                _set_result(asked.output, output)

    def _fail(self, request: str, error: EngineError) -> None:
        asked = self._running.get(request)
        if asked is not None:
            _set_exception(asked.output, error)

    def _die(self, reason: str, left_behind: dict[str, list[Completion] | None]) -> None:
        self._death = reason
        for request, asked in self._running.items():
            # vLLM has not heard of those that are missing.
            _set_exception(asked.output, EngineError(reason, left_behind.get(request, nothing(asked.samples))))
        for call in self._calls:
            _set_exception(call, EngineError(reason))


def _check(config: RunConfig) -> None:
    """Raises: ConfigError when the configuration asks for what this engine can't do."""
    for option in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if config.rollout.engine.options.get(option, 1) > 1:
            raise ConfigError(
                f"rollout.engine.core=inline runs in one process (rollout.engine.options.{option}="
                f"{config.rollout.engine.options[option]}); set rollout.engine.core=process"
            )
    if config.weights.keep_stale_kv and config.rollout.engine.options.get("async_scheduling"):
        raise ConfigError(
            "rollout.engine.core=inline can't tell which version a token came from with weights.keep_stale_kv and "
            "rollout.engine.options.async_scheduling=true; leave that option out, or set rollout.engine.core=process"
        )


def _set_result(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
