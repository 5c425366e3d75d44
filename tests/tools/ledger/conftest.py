"""Runs with a folder and a ledger, and `slipstream ledger` in this process."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import TypeVar

import msgspec
import pytest
from redis.asyncio import Redis

from slipstream.buffer.handlers.inspection import Inspector
from slipstream.buffer.identity import config_identity
from slipstream.buffer.policies.sampling import task_order
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import connect_async
from slipstream.buffer.store.spill import Spiller, SpillFolder
from slipstream.buffer.store.types import DeliveredGroup, IssuedTask, Origin, TicketRequest
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode
from slipstream.configs import RunConfig
from slipstream.configs.load import create_run_folder
from slipstream.tools.launch.redis import redis_command, wait_until_ready
from tests.buffer.groups import train_group
from tests.conftest import free_port
from tests.tools.conftest import CommandLine

TASKS = 20
SERVER = "r0"
ISSUED = 12
SOUND = (
    "sound: 12 issued = 2 in flight + 2 ready + 2 leased + 2 trained + 2 durable + 1 filtered + 0 expired + "
    "1 reissued\n"
)
"""Printed by `verify` for the ledger of `play`."""

MakeRun = Callable[..., RunConfig]
Result = TypeVar("Result")


@pytest.fixture
def ledger(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys, "ledger")


@pytest.fixture
def make_run(redis_url: str, run_name: str, tmp_path: Path) -> MakeRun:
    """A run's configuration, in a folder of its own; keyword arguments replace settings of `buffer`."""

    def make(*, redis: object = None, **buffer: object) -> RunConfig:
        config = RunConfig.model_validate(
            {
                "run": {"name": run_name, "dir": str(tmp_path / "runs")},
                "model": {"build": "digits"},
                "redis": redis or {"url": redis_url},
                "rollout": {"group_size": 2},
                "learner": {"groups_per_step": 2},
                "buffer": {"max_staleness": 20, **buffer},
            }
        )
        create_run_folder(config.paths, config)
        return config

    return make


@pytest.fixture
def played(make_run: MakeRun) -> RunConfig:
    """A running run after `play`."""
    config = make_run()
    play(config)
    return config


@pytest.fixture
def crashed(make_run: MakeRun) -> RunConfig:
    """A run after `play` whose embedded server was killed. `always`: with `everysec` a write may wait for a sync."""
    config = make_run(redis={"port": free_port(), "fsync": "always"})
    with embedded(config):
        play(config)
    return config


@contextmanager
def embedded(config: RunConfig) -> Iterator[Popen[bytes]]:
    """The run's embedded server; killed at the end, as by a crash."""
    with Popen(redis_command(config.redis, config.paths.redis), stdout=DEVNULL, stderr=DEVNULL) as server:
        try:
            wait_until_ready(config.redis, 60)
            yield server
        finally:
            server.kill()


def on(config: RunConfig, do: Callable[[Redis, Ledger], Awaitable[Result]]) -> Result:
    """Runs `do` with the run's Redis and ledger."""

    async def work() -> Result:
        redis = connect_async(config.redis)
        assert isinstance(redis, Redis), "no cluster here"
        try:
            return await do(redis, Ledger(redis, config))
        finally:
            await redis.aclose()

    return asyncio.run(work())


def play(config: RunConfig) -> None:
    """Groups 1 and 2 become durable, 3 and 4 trained, 5 and 6 leased, 7 and 8 ready, 9 filtered, 12 reissued."""

    async def work(_: object, ledger: Ledger) -> None:
        tasks = await start(ledger, config)
        await ledger.deliver([delivered(config, task) for task in tasks[:8]])
        await ledger.filter(tasks[8].id, reason="reward_error", facts=delivered(config, tasks[8]).facts)
        await ledger.heartbeat({SERVER: [task.id for task in tasks[9:11]]}, grace_s=0.0)
        for step in range(2):
            assert await ledger.lease(step, consuming_version=0, count=2) is not None
            await ledger.train(step)
        await ledger.durable(1)
        assert await ledger.lease(2, consuming_version=0, count=2) is not None

    on(config, work)


def spill(config: RunConfig) -> list[Path]:
    """Moves the bytes of the trained and durable groups 1 to 4 into a file; returns the files."""

    async def work(redis: Redis, ledger: Ledger) -> None:
        await redis.sadd(f"{ledger.scripts.prefix}:to_spill", *"1234")
        await Spiller(ledger.scripts, SpillFolder(config.paths.spill)).spill()
        assert (await ledger.counts()).spilled == 4

    on(config, work)
    return list(config.paths.spill.iterdir())


async def start(ledger: Ledger, config: RunConfig) -> list[IssuedTask]:
    """Opens the run and issues the first groups, sorted by their ids."""
    await ledger.identify({**config_identity(config), "train_tasks": str(TASKS)})
    await ledger.join(SERVER, "first")
    tasks: list[IssuedTask] = []
    for held in (ISSUED // 2, ISSUED):
        tasks += (await ledger.issue([TicketRequest(SERVER, 0, held, held)], train_tasks=TASKS))[0]
    assert len(tasks) == ISSUED
    return sorted(tasks, key=lambda task: int(task.id))


def delivered(config: RunConfig, task: IssuedTask, answers: Sequence[m.Trajectory] = ()) -> DeliveredGroup:
    """A group as it arrives, with two answers of its own unless they are given."""
    index = int(task_order(TASKS, seed=config.run.seed, epoch=task.epoch)[task.position])
    group = train_group(task.id, index=index)
    if answers:
        group = msgspec.structs.replace(group, trajectories=list(answers))
    tokens = sum(span.end - span.start for trajectory in group.trajectories for span in trajectory.spans)
    stored = Inspector(config).admit(group, encode(group), Origin(SERVER, "digits", tokens))
    assert isinstance(stored, DeliveredGroup)
    return stored
