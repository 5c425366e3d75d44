"""Runs of the buffer without rollout servers' engines and a learner's model: groups are moved end to end."""

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis

from benchmarks.producer import Report, Workload
from benchmarks.workers import REDIS_DEADLINE_S, Worker, Workers, cpu_s, free_port
from slipstream.buffer.client import BufferClient, GroupReader, new_incarnation
from slipstream.buffer.store.types import LeasedGroups
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import DeadlineError, SlipstreamError
from slipstream.configs.runtime.signals import StopSignals
from slipstream.tools.launch.redis import redis_command, wait_until_ready
from slipstream.tools.launch.supervise import Child, Supervisor

DEADLINE_S = 120.0
"""Of the groups of a step."""
GROUPS_PER_STEP = 128
"""With eight answers each: 1,024, a batch for several GPUs."""
MAX_READY = 4 * GROUPS_PER_STEP
"""Ready groups at which the rate limit stops the producer."""
RETAINED = 100
"""Durable groups that the ledger keeps: Redis stays as small as in a run with little retention."""
CREDITS = 256
"""Tickets that the producer holds: as many as all servers of a small run."""
STEPS_PER_CHECKPOINT = 4


@dataclass(frozen=True)
class Transfer:
    """Measurements of groups that were moved end to end."""

    groups: int
    groups_per_s: float
    """From the first push to the last decoded group."""
    latencies_s: list[float]
    """See `Report`."""
    cpu_s: dict[str, float]
    """CPU time by process."""


class BufferWorkers(Workers):
    """One Redis, and runs on it."""

    def __init__(self, folder: Path, supervisor: Supervisor, signals: StopSignals) -> None:
        super().__init__(folder, supervisor, signals)
        self._redis_port = free_port()
        self._runs = 0
        config = self.config()
        self.redis = psutil.Process(
            supervisor.start("redis", redis_command(config.redis, config.paths.redis)).process.pid
        )
        wait_until_ready(config.redis, REDIS_DEADLINE_S, pause=self.pause)

    def config(
        self,
        *,
        sampler: str = "fifo",
        group_size: int = 8,
        groups_per_step: int = GROUPS_PER_STEP,
        max_staleness: int = 1_000_000,
        max_ready: int | None = MAX_READY,
    ) -> RunConfig:
        """The configuration of a new run; `max_ready` None: no rate limit."""
        self._runs += 1
        address = f"tcp://127.0.0.1:{free_port()}"
        limiter = {} if max_ready is None else {"samples_per_insert": 1, "tolerance": max_ready}
        return RunConfig.model_validate(
            {
                "run": {"name": f"bench{self._runs}", "dir": str(self.folder)},
                "model": {"build": "digits"},
                "redis": {"port": self._redis_port},
                "rollout": {"group_size": group_size},
                "learner": {"groups_per_step": groups_per_step},
                "buffer": {
                    "bind": address,
                    "endpoint": address,
                    "sampler": {"name": sampler},
                    "max_staleness": max_staleness,
                    "limiter": limiter,
                    "retention": {"max_groups": RETAINED},
                },
            }
        )

    def service(self, config: RunConfig) -> contextlib.AbstractContextManager[Child]:
        """A run's service, in a process of its own."""
        return self.process(f"{config.run.name}-service", "slipstream.buffer.cli", self.write_config(config))

    @contextlib.contextmanager
    def pipeline(self, *, group_size: int) -> Iterator["Pipeline"]:
        """A new run: service and producer in processes of their own, and a learner without a model in this one."""
        config = self.config(group_size=group_size)
        producer = (f"{config.run.name}-producer", "benchmarks.producer")
        with (
            self.service(config) as service,
            self.worker(*producer, config.buffer.endpoint, config.run.name, str(CREDITS)) as worker,
            contextlib.closing(Pipeline(self, config, service, worker)) as pipeline,
        ):
            yield pipeline

    def redis_client(self) -> redis.Redis:
        """A plain client."""
        return redis.Redis(port=self._redis_port, socket_timeout=DEADLINE_S)


class Pipeline:
    """A run's service, producer, and a learner without a model: leasing, reading and confirming overlap."""

    def __init__(self, workers: BufferWorkers, config: RunConfig, service: Child, producer: Worker) -> None:
        """Raises: SlipstreamError when the service ends or does not answer."""
        self.service = psutil.Process(service.process.pid)
        self._workers = workers
        self._producer = producer
        incarnation = new_incarnation()
        self._feed = BufferClient(config, "feed", incarnation)
        self._control = BufferClient(config, "control", incarnation)
        self._reader = GroupReader(config.redis, run=config.run.name)
        self._leases, self._confirmations = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._step = 0
        try:
            self._control.hello(0)
        except SlipstreamError as error:
            self.close()
            raise SlipstreamError("\n".join([str(error), *service.last_lines(20)])) from error

    def transfer(self, groups: int, *, answers: int, tokens: int, rate: float | None = None) -> Transfer:
        """Moves `groups`, a multiple of a step's; `rate` as in `Workload`."""
        processes = {"service": self.service, "redis": self._workers.redis, "consumer": psutil.Process()}
        before = {name: cpu_s(process) for name, process in processes.items()}
        self._producer.send(Workload(groups=groups, answers=answers, tokens=tokens, rate=rate))
        last_decoded = self._consume(groups)
        used_s = {name: cpu_s(process) - before[name] for name, process in processes.items()}
        report: Report = self._producer.receive(Report, DEADLINE_S)
        return Transfer(
            groups=groups,
            groups_per_s=groups / (last_decoded - report.first_push),
            latencies_s=report.latencies_s,
            cpu_s={**used_s, "producer": report.cpu_s},
        )

    def close(self) -> None:
        """Closes the connections."""
        self._leases.shutdown()
        self._confirmations.shutdown()
        self._feed.close()
        self._control.close()

    def _consume(self, groups: int) -> float:
        """Takes the groups, a step's at a time; returns when the last was decoded, on the monotonic clock.

        Raises: SlipstreamError when a process has ended, DeadlineError when the groups don't arrive.
        """
        last_decoded = 0.0
        confirmed = self._confirmations.submit(self._workers.check)
        lease = self._leases.submit(self._lease, self._step)
        for steps_left in reversed(range(groups // GROUPS_PER_STEP)):
            ids = lease.result().ids
            if steps_left:
                lease = self._leases.submit(self._lease, self._step + 1)
            self._reader.read(ids)
            last_decoded = time.monotonic()
            confirmed.result()
            confirmed = self._confirmations.submit(self._confirm, self._step)
            self._step += 1
        confirmed.result()
        return last_decoded

    def _confirm(self, step: int) -> None:
        self._control.trained(step)
        self._control.published(step + 1, evaluate=False)
        if (step + 1) % STEPS_PER_CHECKPOINT == 0:
            self._control.checkpointed(step + 1)

    def _lease(self, step: int) -> LeasedGroups:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self._workers.check()
            try:
                lease = self._feed.lease(step, count=GROUPS_PER_STEP, consuming_version=step, wait_s=1.0)
            except DeadlineError:
                self._workers.check()  # if the service has ended, that is the better error
                raise
            if lease is not None:
                return lease
        raise DeadlineError(f"no {GROUPS_PER_STEP} groups became ready within {DEADLINE_S:g} s")


def whole_steps(groups: float) -> int:
    """The nearest multiple of a step's groups, at least one step."""
    return max(1, round(groups / GROUPS_PER_STEP)) * GROUPS_PER_STEP
