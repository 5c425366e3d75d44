"""The way of a group: pushed, stored, leased, decoded; against the bare SET and MGET of the same bytes."""

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from slipstream.buffer.connect import connect
from slipstream.buffer.wire.codec import encode
from slipstream.buffer.wire.messages import TRAIN, Group
from slipstream.configs import RunConfig
from slipstream.tools.bench.consumer import Consumer
from slipstream.tools.bench.cpu import thread_cpu_s
from slipstream.tools.bench.producer import Report, Work, trajectories
from slipstream.tools.bench.stage import GROUPS_PER_STEP, Stage

ANSWERS = 8
TOKENS = 1024
CREDITS = 64


@dataclass(frozen=True)
class Passage:
    """Groups that went all the way."""

    groups: int
    wall_s: float
    """From the first push to the last decoded group."""
    report: Report
    cpu_s: Counter[str] = field(default_factory=Counter)
    """CPU seconds by `process, thread`."""
    redis_s: dict[str, float] = field(default_factory=dict)
    """Seconds that Redis spent in each command."""

    @property
    def groups_per_s(self) -> float:
        """Throughput."""
        return self.groups / self.wall_s


def work(config: RunConfig, groups: int, *, answers: int = ANSWERS, tokens: int = TOKENS, rate: float | None = None) -> Work:
    """A producer's work for this run."""
    return Work(
        endpoint=config.buffer.endpoint,
        run=config.run.name,
        groups=groups,
        answers=answers,
        tokens=tokens,
        credits=CREDITS,
        rate=rate,
    )


def passage(
    stage: Stage, config: RunConfig, consumer: Consumer, service_pid: int, groups: int, *, rate: float | None = None
) -> Passage:
    """Sends `groups` (a multiple of a step's) through the run's service."""
    with connect(config.redis) as redis, stage.producing(work(config, groups, rate=rate)) as producer:
        redis.config_resetstat()
        pids = {"service": service_pid, "redis": stage.redis.process.pid, "consumer": os.getpid()}
        before = {who: thread_cpu_s(pid) for who, pid in pids.items()}
        last_decoded = consumer.consume(groups).last_decoded
        cpu_s = Counter(
            {
                f"{who}, {thread}": used
                for who, pid in pids.items()
                for thread, used in (thread_cpu_s(pid) - before[who]).items()
            }
        )
        report = producer.report()
        cpu_s["producer"] = report.cpu_s  # type: ignore[assignment]
        return Passage(groups, last_decoded - report.first_push, report, cpu_s, _command_seconds(redis))


def bare(config: RunConfig, groups: int) -> float:
    """Groups per second through pipelined SET and then MGET, a step's worth at a time, of the same bytes."""
    blob = encode(Group(id="1", kind=TRAIN, epoch=0, indices=[0], trajectories=trajectories(ANSWERS, TOKENS, 0)))
    keys = [f"bare:{number}" for number in range(GROUPS_PER_STEP)]
    with connect(config.redis) as redis:
        started = time.monotonic()
        for _ in range(groups // GROUPS_PER_STEP):
            pipeline = redis.pipeline(transaction=False)
            for key in keys:
                pipeline.set(key, blob)
            pipeline.execute()
            redis.mget(keys)
        seconds = time.monotonic() - started
        redis.delete(*keys)
    return groups / seconds


def _command_seconds(redis: "Redis") -> dict[str, float]:
    stats: dict[str, Any] = redis.info("commandstats")  # type: ignore[assignment]
    return {name.removeprefix("cmdstat_"): each["usec"] / 1e6 for name, each in stats.items()}
