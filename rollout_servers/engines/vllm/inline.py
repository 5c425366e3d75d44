"""vLLM's engine stepped in a thread of the rollout server: no serialisation between server and engine core."""

import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from torch import Tensor
from vllm import EngineArgs, SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import RequestOutputCollector

from slipstream.buffer.wire.weights.protocol import Form, Manifest
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema import RunConfig
from slipstream.rollout_servers.engines.base import (
    Completion,
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
from slipstream.rollout_servers.engines.thread import EngineThread
from slipstream.rollout_servers.engines.vllm.arguments import SCORED_FIRST, engine_arguments, has_gpu
from slipstream.rollout_servers.engines.vllm.convert import (
    completions,
    prompt_logprobs,
    sampling_params,
    scoring_params,
    token_prompt,
    unfinished,
)


class SteppedEngine:
    """vLLM's engine with its core in this process.

    Attributes:
        llm: vLLM's own engine.
        version: the policy version that new tokens come from.
        vocabulary: how many tokens the model knows.
    """

    _ended = False
    """Whether one of this process has."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Loads the model. Raises: whatever vLLM raises."""
        # The engines of a process share these; one that died has taken them apart.
        _ROPE_DICT.clear()
        if SteppedEngine._ended:
            gc.unfreeze()
            gc.collect()
        self.llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.version = 0
        self.vocabulary = self.llm.model_config.get_vocab_size()
        self._preemptions, self._updating = 0, False
        self._stamp(0)
        core: Any = self.llm.engine_core
        self._watch(core.engine_core.scheduler)
        # What was loaded stays: the collector need not walk through it again at every step.
        gc.collect()
        gc.freeze()

    @property
    def pressure(self) -> Pressure:
        """As of now; what an update preempts is not counted."""
        return Pressure(kv_cache_usage=self._kv_cache.usage, preemptions=self._preemptions)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to step for."""
        return not self.llm.has_unfinished_requests()

    def add(self, request: str, prompt: Any, params: SamplingParams, priority: int) -> None:
        """Takes a request on. Raises: RequestRefused when vLLM does not want it."""
        try:
            self.llm.add_request(request, prompt, params, priority=priority)
        except (VLLMClientError, ValueError) as error:  # a verdict on this one request; the engine lives on
            raise RequestRefused(f"vLLM refused a request: {error}") from error

    def step(self) -> list[tuple[str, RequestOutput]]:
        """One token for all that run; returns the requests that are finished by it."""
        outputs: list[Any] = self.llm.step()
        return [(output.request_id, output) for output in outputs if output.finished]

    def cut_short(self, request: str) -> RequestOutput | None:
        """Ends a request; returns what it has come to, None if it had finished."""
        output, aborted = self._withdraw(request)
        self.llm.engine_core.abort_requests(aborted)
        return output

    def left_behind(self, requests: Sequence[str]) -> dict[str, list[Completion] | None]:
        """What the requests of an engine that died had come to: their tokens outlive its core."""
        withdrawn = {request: self._withdraw(request)[0] for request in requests}
        return {
            request: unfinished(output, version=self.version)
            for request, output in withdrawn.items()
            if output is not None
        }

    def install(self, version: int, tensors: list[tuple[str, Tensor]], *, keep_stale_kv: bool) -> float:
        """Loads a version between two steps, which is the pause; returns seconds that it took.

        Raises: UpdateFailed while the model is whole, EngineError once it is in pieces.
        """
        paused_at = time.perf_counter()
        try:
            self.llm.collective_rpc("stage", args=(tensors,))
            if not keep_stale_kv:
                self._drop_kv_cache()
        except Exception as error:
            raise UpdateFailed(f"vLLM failed: {error!r}") from error
        try:
            self.llm.collective_rpc("load_staged")
        except Exception as error:
            raise EngineError(f"vLLM is left with half of version {version}: {error!r}") from error
        self._stamp(version)
        return time.perf_counter() - paused_at

    def close(self) -> None:
        """Frees the model and its cache; what else is left of it the next engine of this process collects.

        Not here: a process that ends would walk through all of vLLM for nothing, for a second.
        """
        self.llm.engine_core.shutdown()
        del self.llm
        SteppedEngine._ended = True

    def _drop_kv_cache(self) -> None:
        """Of all that run, by preempting them."""
        self._updating = True
        try:
            self.llm.reset_prefix_cache(reset_running_requests=True)
        finally:
            self._updating = False

    def _stamp(self, version: int) -> None:
        self.llm.engine_core.set_weight_version(str(version))
        self.version = version

    def _watch(self, scheduler: Any) -> None:
        """Counts preemptions: vLLM does so for its metrics only, which would cost something at every token."""
        self._kv_cache = scheduler.kv_cache_manager
        preempt = scheduler._preempt_request

        def counted(*arguments: Any, **named: Any) -> None:
            self._preemptions += not self._updating
            preempt(*arguments, **named)

        scheduler._preempt_request = counted

    def _withdraw(self, request: str) -> tuple[RequestOutput | None, list[str]]:
        """What a request has come to, None if it had finished; and the ids under which the core still works on it."""
        processor = self.llm.output_processor
        states = [processor.request_states[each] for each in processor.external_req_ids.get(request, ())]
        if not states:
            return None, []
        # Under vLLM's own name for the whole request: under ours it would forget the samples and keep their parent.
        whole = states[0].parent_req or states[0]
        # vLLM tells what an aborted request came to only to those that have a queue.
        collector = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, whole.request_id)
        for state in states:
            state.queue = collector
        aborted = processor.abort_requests([whole.request_id], internal=True)
        output: Any = collector.get_nowait()
        return output, aborted


class InlineEngine:
    """vLLM in one engine thread.

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
        self._request_numbers = itertools.count()
        self._thread = EngineThread("vLLM", self._loaded, deadline_s=2 * config.weights.deadline_s)

    @classmethod
    async def start(cls, config: RunConfig, model: Path, generation: Generation) -> Self:
        """Loads the model.

        Raises: ConfigError when the configuration asks for what this engine can't do; EngineError when it does not
        start, or takes longer than `rollout.engine.start_deadline_s`.
        """
        _check(config)
        engine = cls(config, model, generation)
        await engine._thread.start(deadline_s=config.rollout.engine.start_deadline_s)
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
        """As `Engine.generate` says."""
        params = sampling_params(self.generation, samples=samples, greedy=greedy, max_tokens=max_tokens)
        return completions(await self._ask(prompt_ids, params, deadline_s=deadline_s))

    async def join(self, group: Form) -> None:
        """Raises: UpdateFailed."""
        raise refuse_group("vllm/inline", group)

    async def install(self, version: int, manifest: Manifest, tensors: TensorSource) -> float:
        """As `Engine.install`."""
        check_update("vllm/inline", version, manifest)
        named = list(host_tensors("vllm/inline", tensors).named_tensors(manifest))
        keep = self._keep_stale_kv
        return await self._thread.call(lambda: self._stepped.install(version, named, keep_stale_kv=keep))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """log-prob of each token but the first, given those before it, at temperature 1.

        Raises: RequestRefused, EngineError.
        """
        return prompt_logprobs(await self._ask(token_ids, scoring_params(), deadline_s=None, priority=SCORED_FIRST))

    async def checksums(self) -> None:
        """vLLM fuses and prepacks the tensors that it is given."""

    async def pressure(self) -> Pressure:
        """As of now; what an update preempts is not counted. Raises: EngineError."""
        # In the thread, though any could look: nobody else would notice an engine that hangs.
        return await self._thread.call(lambda: self._stepped.pressure)

    async def close(self) -> None:
        """Ends the engine thread and frees the model; whoever still waits hears of it."""
        await self._thread.close()

    @contextmanager
    def _loaded(self) -> Iterator[SteppedEngine]:
        self._stepped = SteppedEngine(self._arguments)
        try:
            yield self._stepped
        finally:
            self._stepped.close()

    async def _ask(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, deadline_s: float | None, priority: int = 0
    ) -> RequestOutput:
        prompt = token_prompt(prompt_ids, vocabulary=self._stepped.vocabulary)
        request = str(next(self._request_numbers))
        return await self._thread.ask(
            request, lambda: self._stepped.add(request, prompt, params, priority), deadline_s=deadline_s
        )


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
