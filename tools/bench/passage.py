"""Groups on their way: from a producer through the service and Redis to a consumer."""

import cProfile
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from redis import Redis

from slipstream.configs import RunConfig
from slipstream.tools.bench.consumer import Consumed, Consumer
from slipstream.tools.bench.cpu import thread_cpu_s
from slipstream.tools.bench.producer import Report, Work
from slipstream.tools.bench.stage import BACKLOG, Stage

CREDITS = 256
"""Groups that the producer has tickets for: as many servers as it stands for would have."""


@dataclass(frozen=True)
class Passage:
    """Groups that went all the way."""

    groups: int
    report: Report
    consumed: Consumed
    cpu_s: dict[str, float]
    """CPU seconds by process and, after a comma, thread."""
    commands_s: dict[str, float]
    """Seconds that Redis spent in each command; a script's time contains that of the commands it calls."""

    @property
    def groups_per_s(self) -> float:
        """From the first push to the last decoded group."""
        return self.groups / (self.consumed.last_decoded - self.report.first_push)


@dataclass(frozen=True)
class Profiles:
    """Where the profiles of the Python processes go."""

    service: Path
    producer: Path
    consumer: Path


@dataclass(frozen=True)
class Line:
    """A run's service and its consumer, ready for passages."""

    stage: Stage
    config: RunConfig
    consumer: Consumer
    service_pid: int

    def passage(
        self, groups: int, *, answers: int, tokens: int, rate: float | None = None, profiles: Profiles | None = None
    ) -> Passage:
        """Sends `groups`, a multiple of a step's, through; `rate` is in groups per second, None for all it takes."""
        work = Work(
            endpoint=self.config.buffer.endpoint,
            run=self.config.run.name,
            groups=groups,
            extra=BACKLOG if self.config.buffer.shards > 1 else 0,
            answers=answers,
            tokens=tokens,
            credits=CREDITS,
            rate=rate,
        )
        pids = {"service": self.service_pid, "redis": self.stage.redis.process.pid, "consumer": os.getpid()}
        with (
            self.stage.client() as redis,
            self.stage.producing(work, profile=profiles.producer if profiles else None) as producer,
        ):
            redis.config_resetstat()
            before = {who: thread_cpu_s(pid) for who, pid in pids.items()}
            consumed = self._consume(groups, profiles)
            cpu_s = {
                f"{who}, {thread}": used_s - before[who].get(thread, 0.0)
                for who, pid in pids.items()
                for thread, used_s in thread_cpu_s(pid).items()
            }
            report = producer.report()
            cpu_s["producer"] = report.cpu_s
            return Passage(groups, report, consumed, cpu_s, _commands_s(redis))

    def _consume(self, groups: int, profiles: Profiles | None) -> Consumed:
        if profiles is None:
            return self.consumer.consume(groups)
        profiler = cProfile.Profile(time.thread_time)
        try:
            return profiler.runcall(self.consumer.consume, groups)
        finally:
            profiler.dump_stats(profiles.consumer)


@contextmanager
def line(stage: Stage, config: RunConfig, *, profiles: Profiles | None = None) -> Iterator[Line]:
    """Starts the run's service and a consumer in this process."""
    with stage.serving(config, profile=profiles.service if profiles else None) as service:
        consumer = Consumer(config, stage.go_on)
        try:
            yield Line(stage, config, consumer, service.process.pid)
        finally:
            consumer.close()


def _commands_s(redis: Redis) -> dict[str, float]:
    stats = cast(dict[str, dict[str, Any]], redis.info("commandstats"))
    return {name.removeprefix("cmdstat_"): command["usec"] / 1e6 for name, command in stats.items()}
