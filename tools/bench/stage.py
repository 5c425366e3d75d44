"""The processes that a bench of the buffer needs, on free ports and in a temporary folder; nothing of them stays."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import redis

from slipstream.buffer.client.learner import BufferClient
from slipstream.configs import RunConfig
from slipstream.configs.load import dump_config
from slipstream.configs.runtime.errors import DeadlineError, SlipstreamError
from slipstream.configs.runtime.signals import StopSignals
from slipstream.tools.bench.processes import Processes, free_port, supervised
from slipstream.tools.bench.producer import Report, Work
from slipstream.tools.launch.redis import redis_command, wait_until_ready
from slipstream.tools.launch.supervise import Child, Supervisor

START_S = 120.0
GROUPS_PER_STEP = 128
"""Of eight answers each: 1,024, as a learner of several GPUs takes."""
BACKLOG = 4 * GROUPS_PER_STEP
"""Ready groups by which the producer may be ahead of the consumer."""
KEPT = 100
"""Durable groups that the ledger keeps: Redis stays as small as in a run with little retention."""


def whole_steps(groups: float) -> int:
    """About so many groups: a consumer takes those of a step at once."""
    return max(1, round(groups / GROUPS_PER_STEP)) * GROUPS_PER_STEP


class Stage(Processes):
    """One Redis, and whoever is started on it."""

    def __init__(self, folder: Path, supervisor: Supervisor, signals: StopSignals) -> None:
        super().__init__(folder, supervisor, signals)
        self._redis_port = free_port()
        self._runs = 0
        self.redis = self._start_redis()

    def config(
        self, *, shards: int = 1, sampler: str = "fifo", group_size: int = 8, backlog: int | None = BACKLOG
    ) -> RunConfig:
        """The configuration of a new run, which only credits and `backlog` ready groups hold up; None: any number."""
        self._runs += 1
        address = f"tcp://127.0.0.1:{free_port()}"
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
                    "shards": shards,
                    "sampler": {"name": sampler},
                    "max_staleness": 1_000_000,
                    "limiter": {} if backlog is None else {"samples_per_insert": 1, "tolerance": backlog},
                    "retention": {"max_groups": KEPT},
                },
            }
        )

    @contextlib.contextmanager
    def serving(self, config: RunConfig, *, profile: Path | None = None) -> Iterator[Child]:
        """The run's buffer service, in a process of its own; with `profile` under a profiler that writes there."""
        file = self.folder / f"{config.run.name}.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        with self._running(f"{config.run.name}-service", "slipstream.buffer.cli", str(file), profile=profile) as child:
            client = BufferClient(config, "bench")
            try:
                client.hello(0)
            except SlipstreamError as error:
                raise SlipstreamError("\n".join([str(error), *child.last_lines(20)])) from error
            finally:
                client.close()
            yield child

    @contextlib.contextmanager
    def producing(self, work: Work, *, profile: Path | None = None) -> Iterator["Producer"]:
        """A rollout server's part of the wire, in a process of its own."""
        self._runs += 1
        name = f"producer{self._runs}"
        report = self.folder / f"{name}.json"
        words = [msgspec.json.encode(work).decode(), str(report)]
        with self._running(name, "slipstream.tools.bench.producer", *words, profile=profile):
            yield Producer(self, report)

    def client(self) -> redis.Redis:
        """A plain client of its Redis."""
        return redis.Redis(port=self._redis_port, socket_timeout=START_S)

    def _start_redis(self) -> Child:
        config = self.config()
        child = self._supervisor.start("redis", redis_command(config))
        wait_until_ready(config.redis, START_S, pause=self.pause)
        return child

    def _running(
        self, name: str, module: str, *words: str, profile: Path | None
    ) -> contextlib.AbstractContextManager[Child]:
        if profile is None:
            return self.running(name, module, *words)
        return self.running(name, "slipstream.tools.bench.profiled", str(profile), module, *words)


class Producer:
    """The process that `Stage.producing` started."""

    def __init__(self, stage: Stage, report: Path) -> None:
        self._stage = stage
        self._report = report

    def report(self) -> Report:
        """What it has to say once all its groups are acknowledged; it goes on living until its `with` block ends.

        Raises: SlipstreamError when a process died, DeadlineError when it does not come to an end.
        """
        give_up = time.monotonic() + START_S
        while not self._report.exists():
            if time.monotonic() > give_up:
                raise DeadlineError(f"the producer's last groups were not acknowledged within {START_S:g} s")
            self._stage.pause(0.02)
        return msgspec.json.decode(self._report.read_bytes(), type=Report)


@contextlib.contextmanager
def stage() -> Iterator[Stage]:
    """A Redis of its own, as `slipstream up` would start it; all is stopped and deleted in the end."""
    with supervised() as started:
        yield Stage(*started)
