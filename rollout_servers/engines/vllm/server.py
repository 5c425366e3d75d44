"""vLLM's OpenAI-compatible server as a process of its own, spoken to over HTTP: needed for data parallelism."""

import asyncio
import itertools
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import msgspec
from transformers import AutoConfig

from slipstream.buffer.wire.weights import Manifest
from slipstream.configs.folder import RunFolder
from slipstream.configs.schema import RunConfig
from slipstream.rollout_servers.engines.base import (
    Completion,
    EngineError,
    Generation,
    Pressure,
    RequestRefused,
    UpdateFailed,
)
from slipstream.rollout_servers.engines.http.client import FailedAnswer
from slipstream.rollout_servers.engines.http.launch import Command, ServerProcess, choose_port
from slipstream.rollout_servers.engines.vllm.arguments import engine_arguments, has_gpu
from slipstream.rollout_servers.engines.vllm.server_answers import Answers, prompt_logprobs
from slipstream.rollout_servers.engines.vllm.server_flags import command_line_flags
from slipstream.rollout_servers.engines.vllm.server_gauge import ServerGauge
from slipstream.rollout_servers.engines.vllm.server_requests import (
    GENERATE,
    PromptLimits,
    abort_request,
    generate_request,
    score_request,
)
from slipstream.rollout_servers.weights.staging import Staging

CALL_DEADLINE_S = 60.0
_ABORT_EVERY_S = 0.1
_DEATH_S = 1.0
"""How long after its connections a server's process may end."""


class ServerEngine:
    """vLLM behind its own HTTP server.

    Attributes:
        generation: how answers are drawn from now on.
        version: the policy version that new tokens come from.
        shares_memory: yes; vLLM's workers are other processes.
        direct: there is none.
        server: its process.
    """

    shares_memory = True
    direct = None

    def __init__(
        self, server: ServerProcess, generation: Generation, limits: PromptLimits, *, keep_stale_kv: bool
    ) -> None:
        self.generation = generation
        self.version = 0
        self.server = server
        self._client = server.client
        self._limits = limits
        self._keep_stale_kv = keep_stale_kv
        self._request_numbers = itertools.count()
        self._gauge = ServerGauge()
        self._waiting: set[asyncio.Timeout] = set()
        self._death: str | None = None

    @classmethod
    async def start(cls, config: RunConfig, model: Path, generation: Generation) -> Self:
        """Loads the model.

        Raises: EngineError when the server does not start, or takes longer than `rollout.engine.start_deadline_s`.
        """
        arguments = engine_arguments(config, model, gpu=has_gpu())
        limits = PromptLimits(
            vocabulary=AutoConfig.from_pretrained(model).get_text_config().vocab_size,
            context=arguments["max_model_len"],
        )
        command = _command(config, arguments)
        server = await ServerProcess.start(command, deadline_s=config.rollout.engine.start_deadline_s)
        engine = cls(server, generation, limits, keep_stale_kv=config.weights.keep_stale_kv)
        try:
            await engine._set_version(0)
        except EngineError:
            await engine.close()
            raise
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
        self._limits.check(prompt_ids)
        request, version, answers = str(next(self._request_numbers)), self.version, Answers(samples)
        body = generate_request(
            request, prompt_ids, self.generation, samples=samples, greedy=greedy, max_tokens=max_tokens
        )
        try:
            async with self._until_death(), self._cutting_short(request, deadline_s):
                await self._client.stream(GENERATE, body, answers.take, deadline_s=deadline_s + CALL_DEADLINE_S)
            return answers.completions()
        except EngineError as error:
            verdict = await self._verdict(error)
            if version == self.version:  # else it is not known which of the tokens came before an update
                verdict.unfinished = answers.unfinished(version)
            raise verdict from error

    async def install(self, manifest: Manifest, staging: Staging) -> float:
        """Makes the staged version the one that generates; running requests go on, their KV cache is recomputed.

        With `weights.keep_stale_kv` it is not: the log-probs of their later tokens are then of neither version.

        Returns: seconds that generation stood still.
        Raises: UpdateFailed while the model is whole, EngineError once it is in pieces.
        """
        tensors = msgspec.to_builtins(manifest.tensors)
        try:
            await self._in_workers("map_staged", path=str(staging.path), tensors=tensors)
        except RequestRefused as error:
            raise UpdateFailed(f"vLLM can't read version {manifest.version}: {error}") from error
        paused_at = time.perf_counter()
        try:
            await self._call(f"/pause?mode=keep&clear_cache={'false' if self._keep_stale_kv else 'true'}")
            metrics, _ = await asyncio.gather(self._metrics(), self._in_workers("load_staged"))
            if not self._keep_stale_kv:
                self._gauge.excuse_running(metrics)
            await self._set_version(manifest.version)
            await self._call("/resume")
        except RequestRefused as error:
            raise self._die(f"vLLM is left with half of version {manifest.version}: {error}") from error
        except asyncio.CancelledError:
            self._die(f"vLLM is left with half of version {manifest.version}: its installation was cancelled")
            raise
        return time.perf_counter() - paused_at

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """log-prob of each token but the first, given those before it, at temperature 1. Raises: EngineError."""
        self._limits.check(token_ids)
        return prompt_logprobs(await self._call(GENERATE, score_request(token_ids)), token_ids)

    async def checksums(self) -> None:
        """vLLM fuses and repacks the tensors that it is given."""
        return

    async def pressure(self) -> Pressure:
        """How close the engine is to its limits. Raises: EngineError."""
        return self._gauge.pressure(await self._metrics())

    async def close(self) -> None:
        """Ends the server with all its processes."""
        await self.server.close()

    @asynccontextmanager
    async def _until_death(self) -> AsyncIterator[None]:
        """Ends what is awaited inside when the engine is found dead elsewhere. Raises: EngineError."""
        try:
            async with asyncio.timeout(None) as waiting:
                self._waiting.add(waiting)
                yield
        except TimeoutError:
            assert waiting.expired(), "nothing inside lets a deadline of its own pass as that"
            raise EngineError(str(self._death)) from None
        finally:
            self._waiting.discard(waiting)

    @asynccontextmanager
    async def _cutting_short(self, request: str, deadline_s: float) -> AsyncIterator[None]:
        """Aborts the request at its deadline, so that its stream ends with what it has come to."""
        cutting = asyncio.create_task(self._cut_short(request, deadline_s))
        try:
            yield
        finally:
            cutting.cancel()

    async def _cut_short(self, request: str, deadline_s: float) -> None:
        await asyncio.sleep(deadline_s)
        # Again and again: an abort that arrives before its request does nothing.
        while True:
            with suppress(EngineError):  # the stream hears of it too
                await self._client.post("/abort_requests", abort_request(request), deadline_s=CALL_DEADLINE_S)
            await asyncio.sleep(_ABORT_EVERY_S)

    async def _in_workers(self, method: str, **arguments: Any) -> None:
        """Calls a method of `StagedWorker`. Raises: RequestRefused when it raises, EngineError."""
        await self._call("/collective_rpc", {"method": method, "kwargs": arguments})

    async def _set_version(self, version: int) -> None:
        """What vLLM stamps new tokens with. Raises: EngineError."""
        await self._call("/update_weight_version", {"new_version": str(version)})
        self.version = version

    async def _metrics(self) -> str:
        self._check_alive()
        return (await self._judged(self._client.get("/metrics", deadline_s=CALL_DEADLINE_S))).decode()

    async def _call(self, path: str, body: Any = None) -> bytes:
        """A POST. Raises: RequestRefused, EngineError."""
        self._check_alive()
        return await self._judged(self._client.post(path, body, deadline_s=CALL_DEADLINE_S))

    async def _judged(self, answer: Awaitable[bytes]) -> bytes:
        try:
            return await answer
        except EngineError as error:
            raise await self._verdict(error) from error

    async def _verdict(self, error: EngineError) -> EngineError:
        """What an error means: that a healthy server refuses this one request, or that it is dead."""
        if isinstance(error, RequestRefused):
            return error
        if isinstance(error, FailedAnswer):
            if await self.server.healthy():
                return RequestRefused(str(error))
        else:
            await asyncio.wait({self.server.ended}, timeout=_DEATH_S)
        return self._die(self.server.obituary() or str(error))

    def _die(self, reason: str) -> EngineError:
        """Tells all who wait; the first reason counts."""
        self._death = self._death or reason
        told, self._waiting = self._waiting, set()
        for waiting in told:
            waiting.reschedule(asyncio.get_running_loop().time())
        return EngineError(self._death)

    def _check_alive(self) -> None:
        death = self._death or self.server.obituary()
        if death is not None:
            raise self._die(death)


def _command(config: RunConfig, arguments: Mapping[str, Any]) -> Command:
    port = choose_port(config.rollout.engine.server_port)
    flags = command_line_flags(
        {
            **arguments,
            "host": "127.0.0.1",
            "port": port,
            "enable_scale_out": True,  # the endpoint for token ids
            "disable_uvicorn_access_log": True,
            "disable_log_stats": None,  # else there are no metrics
        }
    )
    return Command(
        name="vLLM's server",
        arguments=[
            str(config.rollout.engine.python or sys.executable),
            "-m",
            "vllm.entrypoints.openai.api_server",
            *flags,
        ],
        # The endpoints that pause generation and install weights are among those for developers.
        environment={"VLLM_SERVER_DEV_MODE": "1"},
        port=port,
        health="/health",
        console=RunFolder.of(config).logs / f"rollout-{socket.gethostname()}-{os.getpid()}.engine.console",
    )
