"""vLLM's engine stepped in a thread of the rollout server: no serialisation between server and engine core."""

import gc
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

from torch import Tensor
from vllm import EngineArgs, SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import RequestOutputCollector

from slipstream.buffer.wire.weights.protocol import Manifest
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines.base import (
    Completion,
    EngineError,
    EngineSettings,
    ExpertReader,
    Pressure,
    PromptImage,
    RequestRefused,
    UpdateFailed,
)
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.engines.thread import EngineThread
from slipstream.rollout_servers.engines.vllm.arguments import PARALLEL_OPTIONS, engine_arguments, has_gpu
from slipstream.rollout_servers.engines.vllm.engine import (
    VllmEngine,
    adapter_request,
    token_prompt,
    tokens_so_far,
    unfinished,
)
from slipstream.rollout_servers.engines.vllm.experts import reader_of
from slipstream.rollout_servers.tally import Tally


class SteppedEngine:
    """vLLM's engine with its core in this process.

    Attributes:
        llm: vLLM's own engine.
        processor: the requests, as vLLM's output processor has them; also of a closed engine.
        version: the policy version of new tokens.
        vocabulary: number of token ids.
        experts: reads the experts in its outputs; None if it returns none.
    """

    _closed_before = False
    """True if an engine of this process was closed."""

    def __init__(self, arguments: dict[str, Any], *, return_experts: bool) -> None:
        """Loads the model. Raises: what vLLM raises; ConfigError when experts are wanted, and there are none."""
        # vLLM shares these between the engines of a process; a closed engine leaves them unusable.
        _ROPE_DICT.clear()
        if SteppedEngine._closed_before:
            gc.unfreeze()
            gc.collect()
        self.llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.processor = self.llm.output_processor
        self._adapter = adapter_request(self.llm.vllm_config)
        if self._adapter is not None:
            self.llm.collective_rpc("add_adapter")
        self.experts: ExpertReader | None = None
        if return_experts:
            layers: list[list[int]] = self.llm.collective_rpc("return_experts")
            self.experts = reader_of(self.llm.model_config, layers[0])
        self.vocabulary = self.llm.model_config.get_vocab_size()
        self._preemptions, self._updating = 0, False
        self._set_version(0)
        core: Any = self.llm.engine_core
        self._count_preemptions(core.engine_core.scheduler)
        # The collector need not visit what was loaded at every step.
        gc.collect()
        gc.freeze()

    @property
    def pressure(self) -> Pressure:
        """The load now."""
        running, waiting = self._scheduler.get_request_counts()
        return Pressure(self._scheduler.kv_cache_manager.usage, self._preemptions, running, waiting)

    @property
    def idle(self) -> bool:
        """True if no request is unfinished."""
        return not self.llm.has_unfinished_requests()

    def add(self, request: str, prompt: Any, params: SamplingParams, priority: int) -> None:
        """Queues a request. Raises: RequestRefused when vLLM does."""
        try:
            self.llm.add_request(request, prompt, params, priority=priority, lora_request=self._adapter)
        except (VLLMClientError, ValueError) as error:  # concerns this request alone
            raise RequestRefused(f"vLLM refused a request: {error}") from error

    def step(self) -> list[tuple[str, RequestOutput]]:
        """Generates one token of each running sequence. Returns the requests that this finishes."""
        outputs: list[Any] = self.llm.step()
        return [(output.request_id, output) for output in outputs if output.finished]

    def abort(self, request: str) -> RequestOutput | None:
        """Ends a request. Returns its output so far, None if it had finished."""
        output, aborted = self._withdraw(request)
        self.llm.engine_core.abort_requests(aborted)
        return output

    def unfinished(self, requests: Sequence[str]) -> dict[str, list[Completion] | None]:
        """Answers so far of the requests of a crashed engine: the output processor outlives the core."""
        return {request: unfinished(self._withdraw(request)[0], version=self.version) for request in requests}

    def install(self, manifest: Manifest, tensors: list[tuple[str, Tensor]], *, keep_stale_kv: bool) -> float:
        """Loads a version between two steps. Returns the seconds that it took.

        Raises: UpdateFailed while the model is unchanged, EngineError once it is not.
        """
        version, paused_at = manifest.version, time.perf_counter()
        try:
            self.llm.collective_rpc("stage", args=(tensors, manifest.adapter))
            if not keep_stale_kv:
                self._drop_kv_cache()
            if self.llm.model_config.is_multimodal_model:
                self.llm.reset_encoder_cache()
        except Exception as error:  # vLLM raises anything; the reason is passed on
            raise UpdateFailed(f"vLLM failed: {error!r}") from error
        try:
            self.llm.collective_rpc("load_staged")
        except Exception as error:  # vLLM raises anything; the reason is passed on
            raise EngineError(f"vLLM is left with half of version {version}: {error!r}") from error
        self._set_version(version)
        return time.perf_counter() - paused_at

    def close(self) -> None:
        """Frees the model and its cache; the next engine of this process collects the rest.

        Not here: a process that exits would traverse all of vLLM for a second, to no purpose.
        """
        self.llm.engine_core.shutdown()
        del self.llm
        SteppedEngine._closed_before = True

    def _drop_kv_cache(self) -> None:
        """Preempts all running requests, which are recomputed."""
        self._updating = True
        try:
            self.llm.reset_prefix_cache(reset_running_requests=True)
        finally:
            self._updating = False

    def _set_version(self, version: int) -> None:
        self.llm.engine_core.set_weight_version(str(version))
        self.version = version

    def _count_preemptions(self, scheduler: Any) -> None:
        """vLLM counts them for its metrics only, which cost time at every token."""
        self._scheduler = scheduler
        preempt = scheduler._preempt_request

        def counted(*arguments: Any, **named: Any) -> None:
            self._preemptions += not self._updating
            preempt(*arguments, **named)

        scheduler._preempt_request = counted

    def _withdraw(self, request: str) -> tuple[RequestOutput | None, list[str]]:
        """Output of a request so far, None if it had finished; and the ids under which the core still works on it."""
        processor = self.processor
        states = [processor.request_states[each] for each in processor.external_req_ids.get(request, ())]
        if not states:
            return None, []
        # vLLM's own id of the whole request: under ours it would forget the samples and keep their parent.
        whole = states[0].parent_req or states[0]
        # vLLM returns the output of an aborted request only to those that have a queue.
        collector = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, whole.request_id)
        for state in states:
            state.queue = collector
        aborted = processor.abort_requests([whole.request_id], internal=True)
        output: Any = collector.get_nowait()
        return output, aborted


def _repair_llvmlite() -> None:
    """Lets llvmlite's handle of its library have no attributes with names of Python's own.

    It answers to every name, `__dict__` too, at which vLLM's search for kernels in all imported modules fails. numba,
    as plug-ins and their packages use it, imports llvmlite.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is None or not hasattr(ffi.lib, "__dict__"):
        return
    symbol = ffi._lib_wrapper.__getattr__

    def symbol_of_library(handle: object, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return symbol(handle, name)

    ffi._lib_wrapper.__getattr__ = symbol_of_library


class InlineEngine(VllmEngine):
    """vLLM in one engine thread."""

    name = "vllm/inline"

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings.generation, adapts=settings.config.model.lora is not None)
        self._arguments = engine_arguments(settings, gpu=has_gpu())
        self._keep_stale_kv = settings.config.weights.keep_stale_kv
        self._return_experts = settings.config.learner.router_replay
        if self._keep_stale_kv:
            # Otherwise vLLM computes the next tokens already, and stamps them with the version after theirs.
            self._arguments["async_scheduling"] = False
        self._request_numbers = itertools.count()
        self._thread = EngineThread("vLLM", self._loaded, deadline_s=2 * settings.config.weights.deadline_s)

    @classmethod
    async def start(cls, settings: EngineSettings) -> Self:
        """Loads the model.

        Raises: ConfigError for unsupported settings; EngineError when the engine does not start within
        `rollout.engine.start_deadline_s`.
        """
        _check(settings)
        _repair_llvmlite()
        engine = cls(settings)
        await engine._thread.start(deadline_s=settings.config.rollout.engine.start_deadline_s)
        return engine

    @property
    def version(self) -> int:
        return self._stepped.version

    async def _load(self, manifest: Manifest, staging: Staging) -> float:
        tensors, keep = list(staging.named_tensors(manifest)), self._keep_stale_kv
        return await self._thread.call(lambda: self._stepped.install(manifest, tensors, keep_stale_kv=keep))

    async def pressure(self) -> Pressure:
        # Read in the thread, although any could: this detects an engine that hangs.
        return await self._thread.call(lambda: self._stepped.pressure)

    async def close(self) -> None:
        await self._thread.close()

    @contextmanager
    def _loaded(self) -> Iterator[SteppedEngine]:
        self._stepped = SteppedEngine(self._arguments, return_experts=self._return_experts)
        self.experts = self._stepped.experts
        try:
            yield self._stepped
        finally:
            self._stepped.close()

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
        prompt = token_prompt(prompt_ids, images, vocabulary=self._stepped.vocabulary)
        request = str(next(self._request_numbers))
        tally.follow(partial(tokens_so_far, self._stepped.processor, request))
        return await self._thread.request(
            request, lambda: self._stepped.add(request, prompt, params, priority), deadline_s=deadline_s
        )


def _check(settings: EngineSettings) -> None:
    """Raises: ConfigError for settings that this engine does not support."""
    options = settings.config.rollout.engine.options
    for option in PARALLEL_OPTIONS:
        if options.get(option, 1) > 1:
            raise ConfigError(
                f"rollout.engine.core=inline runs in one process (rollout.engine.options.{option}={options[option]}); "
                "set rollout.engine.core=process"
            )
    if settings.config.weights.keep_stale_kv and options.get("async_scheduling"):
        raise ConfigError(
            "rollout.engine.core=inline can't determine the version of a token with weights.keep_stale_kv and "
            "rollout.engine.options.async_scheduling=true; leave that option out, or set rollout.engine.core=process"
        )
