"""vLLM's AsyncLLM: the engine core runs in a process of its own, beside the server's event loop."""

import asyncio
import itertools
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Self

import msgspec
from vllm import SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from slipstream.buffer.wire.weights.protocol import Form, Manifest
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines.base import (
    NOTHING,
    Completion,
    DirectSource,
    DirectTransport,
    EngineError,
    EngineSettings,
    Pressure,
    PromptImage,
    RequestRefused,
    UpdateFailed,
    await_rendezvous,
)
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.engines.vllm.arguments import (
    BACKEND,
    claim_children,
    engine_arguments,
    has_gpu,
    uses_nccl,
)
from slipstream.rollout_servers.engines.vllm.core import Core, load
from slipstream.rollout_servers.engines.vllm.engine import (
    VllmEngine,
    adapter_request,
    token_prompt,
    tokens_so_far,
    unfinished,
)
from slipstream.rollout_servers.engines.vllm.experts import reader_of
from slipstream.rollout_servers.tally import Tally

DEADLINES = 2
"""Deadlines of a group that a call may take: the worker itself may wait for one for the last bucket."""


class NcclTransfer:
    """Receives NCCL broadcasts in vLLM's GPU workers, with vLLM's own transfer engine."""

    def __init__(self, core: Core, *, keep_stale_kv: bool) -> None:
        self._core = core
        self._keep_stale_kv = keep_stale_kv
        self._joined = False

    @property
    def workers(self) -> int:
        """Tensor- and pipeline-parallel ranks of the engine."""
        return int(self._core.llm.vllm_config.parallel_config.world_size)

    async def join(self, group: Form) -> None:
        """Enters a transfer group with all workers. Raises: UpdateFailed, EngineError."""
        self._joined = False
        unique_id = await await_rendezvous(group, ranks=self.workers)
        self._core.deadline_s = DEADLINES * group.deadline_s
        request = WeightTransferInitRequest(
            init_info={
                "nccl_unique_id_b64": unique_id,
                "rank_offset": group.rank,
                "world_size": group.world,
                "packed": True,
                "packed_buffer_size_bytes": group.bucket_bytes,
            }
        )
        # Otherwise they forget the communicator of the earlier group and keep its memory.
        await self._in_workers(self._core.llm.shutdown_weight_transfer_engine())
        # The other members may be dead, and nothing else ends the workers' wait.
        try:
            async with asyncio.timeout(group.deadline_s):
                await self._in_workers(self._core.llm.init_weight_transfer_engine(request))
        except TimeoutError:
            reason = f"vLLM's workers did not connect to the others within {group.deadline_s:g} s"
            raise self._core.crashed(reason) from None
        except asyncio.CancelledError:  # the learner has given the group up
            self._core.crashed("a transfer group was given up while vLLM's workers were connecting to each other")
            raise
        self._joined = True

    async def install(self, manifest: Manifest, source: DirectSource) -> float:
        """Receives a version into the workers' memory while generation is paused; as `Engine.install`."""
        if not self._joined:
            raise UpdateFailed(f"vLLM's workers can't receive version {manifest.version}: they are in no group")
        llm = self._core.llm
        request = WeightTransferUpdateRequest(
            update_info={
                "names": [tensor.name for tensor in manifest.tensors],
                "dtype_names": [tensor.dtype for tensor in manifest.tensors],
                "shapes": [tensor.shape for tensor in manifest.tensors],
            }
        )
        paused_at = time.perf_counter()
        await self._core.pause(clear_cache=not self._keep_stale_kv)
        async with self._core.update(manifest.version):
            await self._core.call(llm.start_weight_update())
            await self._core.call(llm.update_weights(request))
            await source.approval()
            await self._core.call(llm.finish_weight_update())
        return time.perf_counter() - paused_at

    async def _in_workers(self, call: Coroutine[Any, Any, Any]) -> None:
        """Raises: UpdateFailed when the only worker failed, EngineError when one of several did.

        vLLM reads the workers' results up to the first error, and takes the others for results of the next call.
        """
        try:
            await self._core.call(call)
        except UpdateFailed as error:
            if self.workers > 1:
                raise self._core.crashed(f"vLLM's workers are out of step: {error}") from error
            raise


class ProcessEngine(VllmEngine):
    """vLLM with its engine core in another process.

    Attributes:
        direct: NCCL into the GPUs' memory; None on a CPU, and where another transport is configured.
    """

    name = "vllm/process"
    shares_memory = True

    def __init__(self, llm: AsyncLLM, settings: EngineSettings, *, nccl: bool) -> None:
        super().__init__(settings.generation, adapts=settings.config.model.lora is not None)
        self._llm = llm
        self._core = Core(llm, deadline_s=2 * settings.config.weights.deadline_s)
        self._keep_stale_kv = settings.config.weights.keep_stale_kv
        self._vocabulary = llm.model_config.get_vocab_size()
        self._adapter = adapter_request(llm.vllm_config)
        self._request_numbers = itertools.count()
        self._transfer = NcclTransfer(self._core, keep_stale_kv=self._keep_stale_kv) if nccl else None
        if self._transfer is not None and settings.config.rollout.engine.direct is not None:
            self.direct = DirectTransport(settings.config.rollout.engine.direct, self._transfer.workers)

    @classmethod
    async def start(cls, settings: EngineSettings) -> Self:
        """Loads the model.

        Raises: ConfigError for unsupported settings; EngineError when the engine does not start within
        `rollout.engine.start_deadline_s`.
        """
        gpu = has_gpu()
        if settings.config.weights.direct and not gpu:
            transport = settings.config.weights.transport
            raise ConfigError(f"weights.transport={transport} needs a GPU here; set weights.transport=auto")
        if settings.config.rollout.engine.options.get("data_parallel_size", 1) > 1:
            raise ConfigError(
                "rollout.engine.core=process does not do data parallelism (rollout.engine.options."
                "data_parallel_size); start more rollout servers instead"
            )
        arguments = engine_arguments(settings, gpu=gpu)
        nccl = uses_nccl(settings, gpu=gpu)
        if nccl:
            arguments["weight_transfer_config"] = WeightTransferConfig(backend=BACKEND)
        claim_children()
        llm = await load(arguments, deadline_s=settings.config.rollout.engine.start_deadline_s)
        engine = cls(llm, settings, nccl=nccl)
        try:
            await engine._core.set_version(0)
            if engine._adapter is not None:
                await engine._core.rpc("add_adapter")
            if settings.config.learner.router_replay:
                layers: list[list[int]] = await engine._core.rpc("return_experts")
                engine.experts = reader_of(llm.model_config, layers[0])
        except (EngineError, ConfigError, asyncio.CancelledError):
            await engine.close()
            raise
        return engine

    @property
    def version(self) -> int:
        return self._core.version

    async def _load(self, manifest: Manifest, staging: Staging) -> float:
        tensors = msgspec.to_builtins(manifest.tensors)
        complaints = await self._core.rpc("map_staged", str(staging.path), tensors, manifest.adapter)
        for complaint in filter(None, complaints):
            raise UpdateFailed(f"vLLM can't read version {manifest.version}: {complaint}")
        paused_at = time.perf_counter()
        await self._core.pause(clear_cache=not self._keep_stale_kv)
        async with self._core.update(manifest.version):
            await self._core.rpc("load_staged")
        return time.perf_counter() - paused_at

    async def pressure(self) -> Pressure:
        # The gauge is in this process; the call detects a core that hangs.
        await self._core.call(self._llm.is_paused())
        return self._core.gauge.pressure

    async def close(self) -> None:
        await self._core.close()

    async def _ask(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        images: Sequence[PromptImage] = (),
        tally: Tally,
        deadline_s: float | None,
        priority: int = 0,
    ) -> RequestOutput:
        prompt = token_prompt(prompt_ids, images, vocabulary=self._vocabulary)
        try:
            self._core.check_alive()
            request = str(next(self._request_numbers))
            tally.follow(partial(tokens_so_far, self._llm.output_processor, request))
            answers = await self._llm.add_request(
                request, prompt, params, priority=priority, lora_request=self._adapter
            )
            self._core.check_alive()
        except (EngineDeadError, EngineError) as error:
            raise EngineError(self._core.reason(error), [NOTHING] * params.n) from error
        except (VLLMClientError, GracefulHTTPError, ValueError) as error:  # the second when the queue is full
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
                # The collector then holds all tokens so far, unless the request finished at this very moment.
                await self._llm.abort(answers.request_id, internal=True)
                output = await answers.get()
        except Exception as error:  # `get` raises what ended vLLM's output handler, which may be anything
            raise EngineError(self._core.reason(error), self._unfinished(answers)) from error
        finished: RequestOutput = output
        return finished

    def _unfinished(self, answers: RequestOutputCollector) -> list[Completion] | None:
        """Answers of a request so far: vLLM keeps them in this process."""
        self._llm.output_processor.abort_requests([answers.request_id], internal=True)
        output: Any = answers.get_nowait()
        return unfinished(output, version=self.version)
