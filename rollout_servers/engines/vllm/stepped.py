"""vLLM's engine, stepped by hand; all of this belongs to one thread."""

import gc
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from vllm import EngineArgs, SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import RequestOutputCollector

from slipstream.rollout_servers.engines.base import Completion, EngineError, Pressure, RequestRefused, UpdateFailed
from slipstream.rollout_servers.engines.vllm.convert import unfinished


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
