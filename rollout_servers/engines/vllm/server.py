"""vLLM's OpenAI-compatible server as a process of its own, spoken to over HTTP: needed for data parallelism."""

import asyncio
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec
from transformers import AutoConfig

from slipstream.buffer.wire.weights.protocol import Manifest
from slipstream.configs.models import without_remote_code
from slipstream.configs.schema import RunConfig
from slipstream.rollout_servers.engines.base import (
    Completion,
    EngineError,
    Generation,
    Pressure,
    PromptLimits,
    RequestRefused,
    UpdateFailed,
)
from slipstream.rollout_servers.engines.http.requests import Begun, Collected, cut_short
from slipstream.rollout_servers.engines.http.server import (
    Calls,
    Command,
    ServerProcess,
    command_line_flags,
    server_command,
)
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.engines.vllm.arguments import engine_arguments, has_gpu
from slipstream.rollout_servers.engines.vllm.server_answers import Answers, complaints, prompt_logprobs
from slipstream.rollout_servers.engines.vllm.server_gauge import ServerGauge
from slipstream.rollout_servers.engines.vllm.server_requests import (
    ABORT,
    GENERATE,
    abort_request,
    generate_request,
    score_request,
)


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

    def __init__(self, server: ServerProcess, generation: Generation, config: RunConfig, limits: PromptLimits) -> None:
        self.generation = generation
        self.version = 0
        self.server = server
        self._client = server.client
        self._calls = Calls(server, update_deadline_s=config.weights.deadline_s)
        self._limits = limits
        self._keep_stale_kv = config.weights.keep_stale_kv
        self._request_numbers = itertools.count()
        self._begun: set[Begun] = set()
        self._abort = Collected(self._abort_all)
        self._gauge = ServerGauge()

    @classmethod
    async def start(cls, config: RunConfig, model: Path, generation: Generation) -> Self:
        """Loads the model.

        Raises: EngineError when the server does not start, or takes longer than `rollout.engine.start_deadline_s`.
        """
        arguments = engine_arguments(config, model, gpu=has_gpu())
        with without_remote_code(model):
            text = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
        limits = PromptLimits(vocabulary=text.vocab_size, context=arguments["max_model_len"])
        command = _command(config, arguments)
        server = await ServerProcess.start(command, deadline_s=config.rollout.engine.start_deadline_s)
        engine = cls(server, generation, config, limits)
        try:
            await engine._set_version(0)
        except (EngineError, asyncio.CancelledError):
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
        """As `Engine.generate` says."""
        self._calls.check_alive()
        self._limits.check(prompt_ids)
        request, version, answers = str(next(self._request_numbers)), self.version, Answers(samples)
        if deadline_s <= 0:
            return answers.unfinished(version)
        body = generate_request(
            request, prompt_ids, self.generation, samples=samples, greedy=greedy, max_tokens=max_tokens
        )
        begun = Begun(version, partial(answers.unfinished, version))
        self._begun.add(begun)
        try:
            async with self._calls.judged(), cut_short(partial(self._abort, request), deadline_s=deadline_s):
                patience_s = deadline_s + self._calls.deadline_s
                await self._client.stream(GENERATE, body, answers.take, deadline_s=patience_s)
                return answers.completions()
        except EngineError as error:
            error.unfinished = begun.left(self.version)
            raise
        finally:
            self._begun.discard(begun)

    async def install(self, manifest: Manifest, staging: Staging) -> float:
        """Makes the staged version the one that generates; running requests go on, their KV cache is recomputed.

        With `weights.keep_stale_kv` it is not: the log-probs of their later tokens are then of neither version.

        Returns: seconds that generation stood still.
        Raises: UpdateFailed while the model is whole, EngineError once it is in pieces.
        """
        tensors = msgspec.to_builtins(manifest.tensors)
        try:
            wrong = await self._in_workers("map_staged", path=str(staging.path), tensors=tensors)
        except RequestRefused as error:
            wrong = [str(error)]
        if wrong:
            raise UpdateFailed(f"vLLM can't read version {manifest.version}: {wrong[0]}")
        for begun in self._begun:
            begun.before_update(self.version)
        paused_at = time.perf_counter()
        try:
            await self._calls.post(f"/pause?mode=keep&clear_cache={'false' if self._keep_stale_kv else 'true'}")
            metrics, _ = await asyncio.gather(self._metrics(), self._in_workers("load_staged"))
            if not self._keep_stale_kv:
                self._gauge.excuse_running(metrics)
            await self._set_version(manifest.version)
            await self._calls.post("/resume")
        except RequestRefused as error:
            raise self._calls.die(f"vLLM is left with half of version {manifest.version}: {error}") from error
        except asyncio.CancelledError:
            self._calls.die(f"vLLM is left with half of version {manifest.version}: its installation was cancelled")
            raise
        return time.perf_counter() - paused_at

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """log-prob of each token but the first, given those before it, at temperature 1. Raises: EngineError."""
        self._limits.check(token_ids)
        return prompt_logprobs(await self._calls.post(GENERATE, score_request(token_ids)), token_ids)

    async def checksums(self) -> None:
        """vLLM fuses and prepacks the tensors that it is given."""

    async def pressure(self) -> Pressure:
        """How close the engine is to its limits. Raises: EngineError."""
        # Asked beside the metrics, which vLLM tells without its cores: nobody else would notice one that hangs.
        await self._calls.get("/is_paused")
        return self._gauge.pressure(await self._metrics())

    async def close(self) -> None:
        """Ends the server with all its processes; whoever still waits hears of it."""
        with suppress(EngineError):  # it may be dead; requests that go on would only hold up its end
            self._calls.check_alive()
            self._calls.die("vLLM was closed")  # first: what it cuts short as it ends is no answer
        await self.server.close()

    async def _abort_all(self, requests: Sequence[str]) -> None:
        with suppress(EngineError):  # their streams hear of it too
            await self._client.post(ABORT, abort_request(requests), deadline_s=self._calls.deadline_s)

    async def _in_workers(self, method: str, **arguments: Any) -> list[str]:
        """What workers complain of when a method of `StagedWorker` is called. Raises: RequestRefused, EngineError."""
        return complaints(await self._calls.post("/collective_rpc", {"method": method, "kwargs": arguments}))

    async def _set_version(self, version: int) -> None:
        """What vLLM stamps new tokens with. Raises: EngineError."""
        await self._calls.post("/update_weight_version", {"new_version": str(version)})
        self.version = version

    async def _metrics(self) -> str:
        return (await self._calls.get("/metrics")).decode()


def _command(config: RunConfig, arguments: Mapping[str, Any]) -> Command:
    extras = {
        "enable_scale_out": True,  # the endpoint for token ids
        "disable_uvicorn_access_log": True,
        "disable_log_stats": None,  # else there are no metrics
    }
    return server_command(
        config,
        name="vLLM's server",
        python=str(config.rollout.engine.python or sys.executable),
        module="vllm.entrypoints.openai.api_server",
        flags=command_line_flags({**arguments, **extras}, negatable=True),
        # The endpoints that pause generation and install weights are among those for developers.
        environment={"VLLM_SERVER_DEV_MODE": "1"},
        health="/health",
    )
