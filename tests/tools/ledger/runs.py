"""Runs to look into: small, with a group in almost every state."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
import pytest
from redis.asyncio import Redis

from slipstream.buffer.handlers.ingest import arrive
from slipstream.buffer.identity import of_config
from slipstream.buffer.policies.sampling import task_order
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import connect_async
from slipstream.buffer.store.types import DeliveredGroup, IssuedTask
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode
from slipstream.configs import RunConfig
from slipstream.tools.cli import main
from tests.buffer.groups import train_group

TASKS = 20
SERVER = "r0"
ISSUED = 12
SUM = "12 issued = 2 in flight + 2 ready + 2 leased + 2 trained + 2 durable + 1 filtered + 0 expired + 1 reissued"
SOUND = f"sound: {SUM}\n"
"""What `verify` says of a run that was played."""

Result = TypeVar("Result")


def on(config: RunConfig, do: Callable[[Redis, Ledger], Awaitable[Result]]) -> Result:
    """Does something with the run's Redis and ledger."""

    async def work() -> Result:
        redis = connect_async(config.redis)
        assert isinstance(redis, Redis), "no cluster here"
        try:
            return await do(redis, Ledger(redis, config))
        finally:
            await redis.aclose()

    return asyncio.run(work())


async def play(_redis: Redis, ledger: Ledger, config: RunConfig) -> None:
    """Groups 1 and 2 become durable, 3 and 4 trained, 5 and 6 leased, 7 and 8 ready, 9 filtered, 12 reissued."""
    tasks = await start(ledger, config)
    await ledger.deliver([delivered(config, task) for task in tasks[:8]])
    await ledger.filter(tasks[8].id, reason="reward_error", facts=delivered(config, tasks[8]).facts)
    await ledger.hear(SERVER, held=[task.id for task in tasks[9:11]], grace_s=0.0)
    for step in range(2):
        assert await ledger.lease(step, consuming_version=0, count=2) is not None
        await ledger.train(step)
    await ledger.durable(1)
    assert await ledger.lease(2, consuming_version=0, count=2) is not None


async def start(ledger: Ledger, config: RunConfig) -> list[IssuedTask]:
    """Opens the run and issues the first groups, by their ids; where there are two shards, in turn from each."""
    await ledger.identify({**of_config(config), "train_tasks": str(TASKS)})
    await ledger.join(SERVER, "first")
    tasks: list[IssuedTask] = []
    for held in (ISSUED // 2, ISSUED):
        tasks += (await ledger.issue(SERVER, server_version=0, credits=held, train_tasks=TASKS)).tasks
    assert len(tasks) == ISSUED
    return sorted(tasks, key=lambda task: int(task.id))


def delivered(config: RunConfig, task: IssuedTask, answers: Sequence[m.Trajectory] = ()) -> DeliveredGroup:
    """A group as it arrives; with two answers of its own unless they are given."""
    index = int(task_order(TASKS, seed=config.run.seed, epoch=task.epoch)[task.position])
    group = train_group(task.id, index=index)
    if answers:
        group = msgspec.structs.replace(group, trajectories=list(answers))
    stored = arrive(group, encode(group), config)
    assert isinstance(stored, DeliveredGroup)
    return stored


class CommandLine:
    """Runs `slipstream ledger` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = ""
        self.err = ""

    def __call__(self, *arguments: object) -> int:
        """The exit code; what was printed is in `out` and `err`."""
        with pytest.raises(SystemExit) as ended:
            main(["ledger", *map(str, arguments)])
        self.out, self.err = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code
