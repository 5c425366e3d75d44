"""How close AsyncLLM is to its limits, from what its engine core tells with every step."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from vllm.v1.engine import EngineCoreEventType
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger

from slipstream.rollout_servers.engines.base import Pressure


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
