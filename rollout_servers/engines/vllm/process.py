"""vLLM's AsyncLLM: the engine core runs in a process of its own, beside the server's event loop."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
from vllm import SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from slipstream.buffer.wire.weights.protocol import Form, Manifest
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema import RunConfig
from slipstream.rollout_servers.engines.base import (
    NOTHING,
    Completion,
    DirectSource,
    DirectTransport,
    EngineError,
    Generation,
    Pressure,
    RequestRefused,
    TensorSource,
    UpdateFailed,
    check_update,
    host_tensors,
    refuse_group,
)
from slipstream.rollout_servers.engines.vllm.arguments import SCORED_FIRST, engine_arguments, has_gpu, uses_nccl
from slipstream.rollout_servers.engines.vllm.convert import (
    completions,
    prompt_logprobs,
    sampling_params,
    scoring_params,
    token_prompt,
    unfinished,
)
from slipstream.rollout_servers.engines.vllm.core import Core, claim_children, load
from slipstream.rollout_servers.engines.vllm.transfer import BACKEND, NAME, NcclTransfer


class ProcessEngine:
    """vLLM with its engine core in another process.

    Attributes:
        generation: how answers are drawn from now on.
        direct: NCCL into the GPUs' memory; None on a CPU, and where another transport is configured.
        shares_memory: yes; the workers are other processes.
    """

    shares_memory = True

    def __init__(self, llm: AsyncLLM, config: RunConfig, generation: Generation, *, nccl: bool) -> None:
        self.generation = generation
        self._llm = llm
        self._core = Core(llm, deadline_s=2 * config.weights.deadline_s)
        self._keep_stale_kv = config.weights.keep_stale_kv
        self._vocabulary = llm.model_config.get_vocab_size()
        self._request_numbers = itertools.count()
        self._transfer = NcclTransfer(self._core, keep_stale_kv=self._keep_stale_kv) if nccl else None
        self.direct = DirectTransport("nccl", self._transfer.workers) if self._transfer else None

    @classmethod
    async def start(cls, config: RunConfig, model: Path, generation: Generation) -> Self:
        """Loads the model.

        Raises: ConfigError when the configuration asks for what this engine can't do; EngineError when it does not
        start, or takes longer than `rollout.engine.start_deadline_s`.
        """
        gpu = has_gpu()
        if config.weights.transport == "nccl" and not gpu:
            raise ConfigError("weights.transport=nccl needs a GPU here; set weights.transport=auto")
        if config.rollout.engine.options.get("data_parallel_size", 1) > 1:
            raise ConfigError(
                "rollout.engine.core=process does not do data parallelism (rollout.engine.options."
                "data_parallel_size); start more rollout servers instead"
            )
        arguments = engine_arguments(config, model, gpu=gpu)
        nccl = uses_nccl(config, gpu=gpu)
        if nccl:
            arguments["weight_transfer_config"] = WeightTransferConfig(backend=BACKEND)
        claim_children()
        llm = await load(arguments, deadline_s=config.rollout.engine.start_deadline_s)
        engine = cls(llm, config, generation, nccl=nccl)
        try:
            await engine._core.set_version(0)
        except (EngineError, asyncio.CancelledError):
            await engine.close()
            raise
        return engine

    @property
    def version(self) -> int:
        """The policy version that new tokens come from."""
        return self._core.version

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
        params = sampling_params(self.generation, samples=samples, greedy=greedy, max_tokens=max_tokens)
        return completions(await self._ask(prompt_ids, params, deadline_s=deadline_s))

    async def join(self, group: Form) -> None:
        """As `Engine.join`; generation stands still while the workers connect to the others."""
        if self._transfer is None:
            raise refuse_group(NAME, group)
        await self._transfer.join(group)

    async def install(self, version: int, manifest: Manifest, tensors: TensorSource) -> float:
        """As `Engine.install`."""
        check_update(NAME, version, manifest)
        if isinstance(tensors, DirectSource) and self._transfer is not None:
            return await self._transfer.install(manifest, tensors)
        staging = host_tensors(NAME, tensors)
        complaints = await self._core.rpc("map_staged", str(staging.path), msgspec.to_builtins(manifest.tensors))
        for complaint in filter(None, complaints):
            raise UpdateFailed(f"vLLM can't read version {manifest.version}: {complaint}")
        paused_at = time.perf_counter()
        await self._core.pause(clear_cache=not self._keep_stale_kv)
        async with self._core.all_or_death(manifest.version):
            await self._core.rpc("load_staged")
            await self._core.set_version(manifest.version)
            await self._core.resume()
        return time.perf_counter() - paused_at

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """log-prob of each token but the first, given those before it, at temperature 1.

        Raises: RequestRefused, EngineError.
        """
        return prompt_logprobs(await self._ask(token_ids, scoring_params(), deadline_s=None, priority=SCORED_FIRST))

    async def checksums(self) -> None:
        """vLLM fuses and prepacks the tensors that it is given."""

    async def pressure(self) -> Pressure:
        """As of the last step; what an update preempts is not counted. Raises: EngineError."""
        # What it told is here. It is asked all the same: nobody else would notice a core that hangs.
        await self._core.call(self._llm.is_paused())
        return self._core.gauge.pressure

    async def close(self) -> None:
        """Ends the engine's processes; whoever still waits hears of it."""
        await self._core.close()

    async def _ask(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, deadline_s: float | None, priority: int = 0
    ) -> RequestOutput:
        prompt = token_prompt(prompt_ids, vocabulary=self._vocabulary)
        try:
            self._core.check_alive()
            request = str(next(self._request_numbers))
            answers = await self._llm.add_request(request, prompt, params, priority=priority)
            self._core.check_alive()
        except (EngineDeadError, EngineError) as error:
            raise EngineError(self._core.reason(error), [NOTHING] * params.n) from error
        except (VLLMClientError, GracefulHTTPError, ValueError) as error:  # of the second kind is a queue that is full
            raise RequestRefused(f"vLLM refused a request: {error}") from error
        try:
            return await self._finished(answers, deadline_s=deadline_s)
        except asyncio.CancelledError:
            await self._llm.abort(answers.request_id, internal=True)
            raise

    async def _finished(self, answers: RequestOutputCollector, *, deadline_s: float | None) -> RequestOutput:
        try:
            try:
                async with asyncio.timeout(deadline_s):
                    output: Any = await answers.get()
            except TimeoutError:
                # All that it came to is in the collector afterwards, if it did not finish at this very moment.
                await self._llm.abort(answers.request_id, internal=True)
                output = await answers.get()
        except Exception as error:  # whatever ended vLLM's output handler, or the death that was declared
            raise EngineError(self._core.reason(error), self._left_behind(answers)) from error
        finished: RequestOutput = output
        return finished

    def _left_behind(self, answers: RequestOutputCollector) -> list[Completion] | None:
        """What a request had come to: vLLM keeps that in this process."""
        self._llm.output_processor.abort_requests([answers.request_id], internal=True)
        output: Any = answers.get_nowait()
        return None if output is None else unfinished(output, version=self.version)
