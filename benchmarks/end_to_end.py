"""Fixture of the buffer bench: Redis, the service, a producer and a consumer that move groups end to end."""

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis

from slipstream.buffer.client.groups import GroupReader
from slipstream.buffer.client.learner import BufferClient, new_incarnation
from slipstream.buffer.store.types import Lease
from slipstream.configs import RunConfig
from slipstream.configs.load import dump_config
from slipstream.configs.runtime.errors import DeadlineError, SlipstreamError
from slipstream.configs.runtime.signals import StopSignals
from benchmarks.producer import Report, Workload
from benchmarks.workers import Workers, free_port
from slipstream.tools.launch.redis import redis_command, wait_until_ready
from slipstream.tools.launch.supervise import Child, Supervisor

DEADLINE_S = 120.0
"""Of a start, and of the groups of a step."""
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


class Fixture(Workers):
    """One Redis, and runs on it."""

    def __init__(self, folder: Path, supervisor: Supervisor, signals: StopSignals) -> None:
        super().__init__(folder, supervisor, signals)
        self._redis_port = free_port()
        self._runs = 0
        config = self.config()
        self.redis_pid = supervisor.start("redis", redis_command(config.redis, config.paths.redis)).process.pid
        wait_until_ready(config.redis, DEADLINE_S, pause=self.pause)

    def config(self, *, sampler: str = "fifo", group_size: int = 8, max_ready: int | None = MAX_READY) -> RunConfig:
        """The configuration of a new run without a staleness limit; `max_ready` None: no rate limit either."""
        self._runs += 1
        address = f"tcp://127.0.0.1:{free_port()}"
        limiter = {} if max_ready is None else {"samples_per_insert": 1, "tolerance": max_ready}
        return RunConfig.model_validate(
            {
                "run": {"name": f"bench{self._runs}", "dir": str(self.folder)},
                "model": {"build": "digits"},
                "redis": {"port": self._redis_port},
                "rollout": {"group_size": group_size},
                "learner": {"groups_per_step": GROUPS_PER_STEP},
                "buffer": {
                    "bind": address,
                    "endpoint": address,
                    "sampler": {"name": sampler},
                    "max_staleness": 1_000_000,
                    "limiter": limiter,
                    "retention": {"max_groups": RETAINED},
                },
            }
        )

    @contextlib.contextmanager
    def pipeline(self, *, group_size: int = 8) -> Iterator["Pipeline"]:
        """A new run: its service in a process of its own, and a learner without a model in this one."""
        config = self.config(group_size=group_size)
        file = self.folder / f"{config.run.name}.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        with (
            self.process(f"{config.run.name}-service", "slipstream.buffer.cli", str(file)) as service,
            contextlib.closing(Pipeline(self, config, service)) as pipeline,
        ):
            yield pipeline

    def redis_client(self) -> redis.Redis:
        """A plain client."""
        return redis.Redis(port=self._redis_port, socket_timeout=DEADLINE_S)


class Pipeline:
    """A run's service, producers, and a learner without a model: leasing, reading and confirming overlap."""

    def __init__(self, fixture: Fixture, config: RunConfig, service: Child) -> None:
        """Raises: SlipstreamError when the service ends or does not answer."""
        self.service = psutil.Process(service.process.pid)
        self._fixture = fixture
        self._config = config
        incarnation = new_incarnation()
        self._feed = BufferClient(config, "feed", incarnation)
        self._control = BufferClient(config, "control", incarnation)
        self._reader = GroupReader(config.redis, run=config.run.name)
        self._leases, self._confirmations = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._step = self._transfers = 0
        try:
            self._control.hello(0)
        except SlipstreamError as error:
            self.close()
            raise SlipstreamError("\n".join([str(error), *service.last_lines(20)])) from error

    def transfer(self, groups: int, *, answers: int, tokens: int, rate: float | None = None) -> Transfer:
        """Moves `groups`, a multiple of a step's; `rate` as in `Workload`."""
        workload = Workload(
            endpoint=self._config.buffer.endpoint,
            run=self._config.run.name,
            groups=groups,
            answers=answers,
            tokens=tokens,
            credits=CREDITS,
            rate=rate,
        )
        self._transfers += 1
        name = f"{self._config.run.name}-producer{self._transfers}"
        redis_process = psutil.Process(self._fixture.redis_pid)
        processes = {"service": self.service, "redis": redis_process, "consumer": psutil.Process()}
        with self._fixture.worker(name, "benchmarks.producer") as producer:
            before = {name: cpu_s(process) for name, process in processes.items()}
            producer.send(workload)
            last_decoded = self._consume(groups)
            used_s = {name: cpu_s(process) - before[name] for name, process in processes.items()}
            report: Report = producer.receive(Report, DEADLINE_S)
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
        confirmed = self._confirmations.submit(self._fixture.check)
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

    def _lease(self, step: int) -> Lease:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self._fixture.check()
            try:
                lease = self._feed.lease(step, count=GROUPS_PER_STEP, consuming_version=step, wait_s=1.0)
            except DeadlineError:
                self._fixture.check()  # if the service has ended, that is the better error
                raise
            if lease is not None:
                return lease
        raise DeadlineError(f"no {GROUPS_PER_STEP} groups became ready within {DEADLINE_S:g} s")


@contextlib.contextmanager
def fixture() -> Iterator[Fixture]:
    """A fixture with a Redis of its own; everything is stopped and deleted in the end."""
    with Fixture.start() as started:
        yield started


def whole_steps(groups: float) -> int:
    """The nearest multiple of a step's groups, at least one step."""
    return max(1, round(groups / GROUPS_PER_STEP)) * GROUPS_PER_STEP


def cpu_s(process: psutil.Process) -> float:
    """CPU time that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)
