"""The engine `hf`: transformers' forward pass in a thread of the rollout server."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

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
from slipstream.rollout_servers.engines.hf.padding import check_padding
from slipstream.rollout_servers.engines.hf.policy import Policy
from slipstream.rollout_servers.engines.hf.request import Request
from slipstream.rollout_servers.engines.hf.stepper import Stepper
from slipstream.rollout_servers.weights.background import in_background
from slipstream.rollout_servers.weights.staging import Staging

log = get_log("rollout.hf")

Command = Callable[[Stepper], None]
T = TypeVar("T")


class HfEngine:
    """transformers in one engine thread. Whatever touches the model runs there, between two steps.

    Attributes:
        generation: how answers are drawn from now on.
        version: the policy version that new tokens come from.
        shares_memory: no; the engine lives in this process.
        direct: there is none.
    """

    shares_memory = False
    direct = None

    def __init__(self, config: RunConfig, model: Path, generation: Generation) -> None:
        self._config = config
        self._folder = model
        self._deadline_s = 2 * config.weights.deadline_s
        self.generation = generation
        self.version = 0
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._requests: set[Request] = set()
        self._calls: set[asyncio.Future[Any]] = set()
        self._death: str | None = None
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @classmethod
    async def start(cls, config: RunConfig, model: Path, generation: Generation) -> Self:
        """Loads the model.

        Raises: ConfigError when it is not made for the configuration, EngineError when it can't be loaded or that
        takes longer than `rollout.engine.start_deadline_s`.
        """
        engine = cls(config, model, generation)
        engine._thread.start()
        deadline_s = config.rollout.engine.start_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await engine._started
        except TimeoutError:
            engine._commands.put(None)
            raise EngineError(f"transformers did not load {model} within {deadline_s:.0f} s") from None
        return engine

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
        self._check_alive()
        room = self._room_behind(prompt_ids)
        request = Request(
            prompt_ids,
            self.generation,
            samples=samples,
            greedy=greedy,
            max_tokens=min(room, max_tokens or self.generation.max_tokens),
            result=self._loop.create_future(),
        )
        self._requests.add(request)
        self._commands.put(lambda stepper: stepper.add(request))
        cut = self._loop.call_later(deadline_s, self._cut_short, request)
        try:
            return await request.result
        except asyncio.CancelledError:
            self._cut_short(request)
            raise
        finally:
            cut.cancel()
            self._requests.discard(request)

    async def install(self, manifest: Manifest, staging: Staging) -> float:
        """Makes the staged version the one that generates; running requests go on, their KV cache is recomputed.

        `weights.keep_stale_kv` leaves the cache as it is, unless the model's can't be joined: then the next request
        has it recomputed.

        Returns: seconds that generation stood still; recomputing the cache is generation's next step.
        Raises: UpdateFailed unless the version has each parameter once, in its shape and dtype; EngineError.
        """
        return await self._call(lambda stepper: self._install(stepper, manifest, staging))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """log-prob of each token but the first, given those before it, at temperature 1.

        Raises: RequestRefused, EngineError.
        """
        self._check_alive()
        self._room_behind(token_ids)
        return await self._call(lambda stepper: stepper.policy.score(list(token_ids)))

    async def checksums(self) -> dict[str, int]:
        """xxh3 (64 bits) of the model's parameters, by name; tied ones come once. Raises: EngineError."""
        return await self._call(lambda stepper: stepper.policy.checksums())

    async def pressure(self) -> Pressure:
        """`kv_cache_usage` is the share of `max_sequences` times `max_model_len` tokens that the running answers have.

        Raises: EngineError.
        """
        limits = self._config.rollout.engine
        tokens = await self._call(lambda stepper: stepper.tokens)
        return Pressure(kv_cache_usage=tokens / (limits.max_sequences * limits.max_model_len), preemptions=0)

    async def close(self) -> None:
        """Ends the engine thread and frees the model; whoever still waits hears of it."""
        self._commands.put(None)
        await in_background(self._thread.join)
        self._die("was closed")

    def _room_behind(self, prompt_ids: Sequence[int]) -> int:
        """How many tokens may follow a prompt. Raises: RequestRefused."""
        if not prompt_ids:
            raise RequestRefused("a prompt is empty: there is nothing to go on from")
        strange = [token for token in prompt_ids if not 0 <= token < self._vocabulary]
        if strange:
            raise RequestRefused(
                f"token {strange[0]} is not in the model's vocabulary of {self._vocabulary}: wrong tokenizer?"
            )
        context = self._config.rollout.engine.max_model_len
        if len(prompt_ids) >= context:
            raise RequestRefused(
                f"a prompt of {len(prompt_ids)} tokens leaves no room for an answer: the maximum context length is "
                f"{context} (rollout.engine.max_model_len)"
            )
        return context - len(prompt_ids)

    # --- in the engine thread -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            stepper = self._load()
        except ConfigError as error:
            self._tell(_set_exception, self._started, error)
            return
        except Exception as error:  # noqa: BLE001  (whatever transformers raises must reach the waiting server)
            self._tell(_set_exception, self._started, EngineError(f"transformers did not start: {error!r}"))
            return
        self._tell(_set_result, self._started, None)
        try:
            self._serve(stepper)
        except Exception as error:
            log.exception("engine died")
            self._tell(self._die, f"died: {error!r}")

    def _load(self) -> Stepper:
        policy = Policy(self._config, self._folder)
        check_padding(policy, dtype=self._config.model.dtype)
        self._vocabulary = policy.vocabulary
        return Stepper(policy, max_sequences=self._config.rollout.engine.max_sequences, seed=self._config.run.seed)

    def _serve(self, stepper: Stepper) -> None:
        while True:
            while not stepper.busy or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                command(stepper)
            for request in stepper.step():
                self._answer(request)

    def _install(self, stepper: Stepper, manifest: Manifest, staging: Staging) -> float:
        paused_at = time.perf_counter()
        stepper.policy.install(manifest, staging)
        self.version = stepper.version = manifest.version
        if not self._config.weights.keep_stale_kv:
            stepper.recompute()
        return time.perf_counter() - paused_at

    def _answer(self, request: Request) -> None:
        self._tell(_set_result, request.result, request.completions())

    # --- between the two ------------------------------------------------------------------------------------------

    def _cut_short(self, request: Request) -> None:
        def command(stepper: Stepper) -> None:
            stepper.cut_short(request)
            self._answer(request)

        self._commands.put(command)

    async def _call(self, function: Callable[[Stepper], T]) -> T:
        """What the engine thread makes of it. Raises: UpdateFailed, EngineError when the engine is dead or silent."""
        self._check_alive()
        result: asyncio.Future[T] = self._loop.create_future()
        self._calls.add(result)

        def command(stepper: Stepper) -> None:
            if result.cancelled():  # what it was to work on may be gone
                return
            try:
                self._tell(_set_result, result, function(stepper))
            except UpdateFailed as error:  # nothing was touched: the engine lives on
                self._tell(_set_exception, result, error)

        self._commands.put(command)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await result
        except TimeoutError:
            self._die(f"did not answer within {self._deadline_s:g} s")
            raise EngineError(str(self._death)) from None
        finally:
            self._calls.discard(result)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineError(self._death)

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def _die(self, reason: str) -> None:
        self._death = self._death or f"the engine (hf) {reason}"
        for request in self._requests:
            _set_exception(request.result, EngineError(self._death, request.completions()))
        for call in self._calls:
            _set_exception(call, EngineError(self._death))


def _set_result(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
