"""Between our terms and vLLM's."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from vllm import SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.rollout_servers.engines.base import Completion, EngineError, Generation, Pressure, check_vocabulary


def token_prompt(prompt_ids: Sequence[int], *, vocabulary: int) -> Any:
    """vLLM's prompt. Raises: RequestRefused for a token id outside the model's vocabulary."""
    check_vocabulary(prompt_ids, vocabulary)
    return {"prompt_token_ids": list(prompt_ids)}


def sampling_params(
    generation: Generation, *, samples: int, greedy: bool, max_tokens: int | None = None
) -> SamplingParams:
    """How answers are drawn; greedy ones have temperature 0. `max_tokens` takes the place of the configured one."""
    return SamplingParams(
        n=samples,
        temperature=0.0 if greedy else generation.temperature,
        max_tokens=generation.max_tokens if max_tokens is None else max_tokens,
        ignore_eos=generation.ignore_eos,
        stop_token_ids=list(generation.stop_token_ids),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> SamplingParams:
    """What makes vLLM score a prompt; its tokens' log-probs are always of the distribution at temperature 1."""
    return SamplingParams(
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completions(output: RequestOutput) -> list[Completion]:
    """The answers of a finished request. Raises: EngineError when vLLM left out log-probs or version spans."""
    return [_completion(answer) for answer in output.outputs]


def unfinished(output: RequestOutput, *, version: int) -> list[Completion] | None:
    """What a request that died with its engine had come to; tokens without a stamp are taken for `version`'s.

    None for a prompt that was to be scored.
    """
    if output.prompt_logprobs is not None:
        return None
    for answer in output.outputs:
        if answer.weight_versions is None:
            answer.weight_versions = [WeightVersionSpan(str(version), 0, len(answer.token_ids))]
    return completions(output)


def prompt_logprobs(output: RequestOutput) -> list[float]:
    """log-prob of each token of a scored prompt but the first. Raises: EngineError when vLLM left them out."""
    flat: Any = output.prompt_logprobs
    if flat is None:
        raise EngineError("vLLM did not score a prompt")
    return list(flat.logprobs)


def _completion(answer: CompletionOutput) -> Completion:
    logprobs: Any = answer.logprobs
    if logprobs is None or answer.weight_versions is None:
        raise EngineError("vLLM returned an answer without log-probs or without weight versions")
    reason = answer.finish_reason
    return Completion(
        token_ids=answer.token_ids,
        logprobs=logprobs.logprobs,
        spans=[VersionSpan(version=int(s.version), start=s.start, end=s.end) for s in answer.weight_versions],
        # An error of this request alone, such as a KV cache that could not be loaded, has cut it short too.
        finish_reason="abort" if reason is None or reason == "error" else reason,
    )


class PressureGauge(PrometheusStatLogger):
    """Keeps the last step's numbers; takes the place of vLLM's Prometheus logger, which nobody here reads.

    vLLM makes that one beside any logger that is not derived from it.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        """Nothing of the base class's: it would register a hundred metrics with Prometheus.

        So whatever vLLM calls of a logger must be said anew below.
        """
        self._usage = 0.0
        self._preemptions = 0
        # A request tells of its preemption when it goes on, which may be after the next update.
        self._forgiven: deque[tuple[float, float]] = deque(maxlen=100)

    @classmethod
    def of(cls, llm: AsyncLLM) -> Self:
        """The gauge that an engine was given as its logger; before its first request."""
        assert llm.logger_manager is not None, "vLLM makes one when it is given a logger"
        (gauge,) = llm.logger_manager.stat_loggers
        assert isinstance(gauge, cls), "it takes the place of the Prometheus logger"
        # Its core goes on telling; but statistics of every single token would cost this process half as much again.
        llm.log_stats = llm.output_processor.log_stats = False
        processor: Any = llm.output_processor
        processor._update_stats_from_output = gauge._look
        return gauge

    @property
    def pressure(self) -> Pressure:
        """As of the last step."""
        return Pressure(kv_cache_usage=self._usage, preemptions=self._preemptions)

    @contextmanager
    def forgiving(self) -> Iterator[None]:
        """What is preempted meanwhile is preempted for an update, not for want of room."""
        started_at = time.monotonic()  # Linux has one such clock for all processes
        yield
        self._forgiven.append((started_at, time.monotonic()))

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Called by vLLM after every step."""
        if scheduler_stats is not None:
            self._usage = scheduler_stats.kv_cache_usage

    def record_admission_rejection(self, reason: str) -> None:
        """Called by vLLM when a request finds its queue full; who asks hears of it."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Called by vLLM when the engine is put to sleep, which nobody does here."""

    def log_engine_initialized(self) -> None:
        """Nothing to log."""

    def _look(self, state: Any, output: Any, timestamp: Any, iteration_stats: Any) -> None:
        """Called by vLLM for every request that a step made tokens for."""
        for event in output.events or ():
            if event.type is EngineCoreEventType.PREEMPTED and not self._is_forgiven(event.timestamp):
                self._preemptions += 1

    def _is_forgiven(self, preempted_at: float) -> bool:
        return any(start <= preempted_at <= end for start, end in self._forgiven)
