"""Pools: bounds, reuse, health checks, ends."""

import asyncio
from dataclasses import dataclass, field

import pytest
import structlog

from slipstream.env.tools.pool import Pool

DEADLINE_S = 30.0


@dataclass(eq=False)
class Thing:
    """A resource that records what happens to it."""

    number: int
    healthy: bool = True
    stopped: bool = False


@dataclass
class Factory:
    things: list[Thing] = field(default_factory=list)
    fails: bool = False
    stop_fails: bool = False

    async def start(self) -> Thing:
        if self.fails:
            raise OSError("no more")
        self.things.append(Thing(len(self.things)))
        return self.things[-1]

    async def is_healthy(self, thing: Thing) -> bool:
        return thing.healthy

    async def stop(self, thing: Thing) -> None:
        await asyncio.sleep(0)
        thing.stopped = True
        if self.stop_fails:
            raise OSError("stuck")

    def pool(self, *, size: int = 2, reuse: bool = True) -> Pool[Thing]:
        return Pool(self.start, is_healthy=self.is_healthy, stop=self.stop, size=size, reuse=reuse)


async def test_resources_are_reused_or_stopped() -> None:
    for reuse in (True, False):
        factory = Factory()
        pool = factory.pool(reuse=reuse)
        for _ in range(3):
            async with pool.use():
                pass
        assert [thing.stopped for thing in factory.things] == ([False] if reuse else [True] * 3)


async def test_size_bounds_the_resources_at_a_time() -> None:
    factory, release = Factory(), asyncio.Event()
    pool, used = factory.pool(size=2, reuse=False), list[Thing]()

    async def use() -> None:
        async with pool.use() as thing:
            used.append(thing)
            await release.wait()

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        for _ in range(5):
            tasks.create_task(use())
        while len(used) < 2:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(used) == 2
        release.set()
    assert len(used) == 5


async def test_unhealthy_resource_is_replaced() -> None:
    factory = Factory()
    pool = factory.pool()
    async with pool.use() as first:
        first.healthy = False
    async with pool.use() as second:
        assert second is not first
    assert first.stopped


async def test_failed_start_frees_its_slot() -> None:
    factory = Factory(fails=True)
    pool = factory.pool(size=1)
    for _ in range(3):
        with pytest.raises(OSError, match="no more"):
            async with pool.use():
                pass
    factory.fails = False
    async with asyncio.timeout(DEADLINE_S), pool.use():
        pass


async def test_cancelled_user_stops_its_resource() -> None:
    factory = Factory()
    pool = factory.pool(reuse=False)

    async def hang() -> None:
        async with pool.use():
            await asyncio.Future()

    task = asyncio.create_task(hang())
    while not factory.things:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert factory.things[0].stopped


async def test_close_stops_idle_and_used_resources() -> None:
    factory = Factory(stop_fails=True)
    pool = factory.pool()
    with structlog.testing.capture_logs() as logs:
        async with pool.use():
            async with pool.use():
                pass
            await pool.close()
    assert [thing.stopped for thing in factory.things] == [True, True]
    assert [(line["log_level"], line["failures"]) for line in logs] == [("warning", 1), ("warning", 2)]
    with pytest.raises(RuntimeError):
        async with pool.use():
            pass
