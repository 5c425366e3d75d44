"""How the cost of a lease grows with the groups that are ready, and with shards."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from slipstream.buffer.policies.sampling import order
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import connect_async
from slipstream.buffer.store.types import DeliveredGroup, Facts
from slipstream.configs import RunConfig
from slipstream.configs.schema.buffer import SamplerConfig
from slipstream.tools.bench.figures import Figure, Goal
from slipstream.tools.bench.passage import line
from slipstream.tools.bench.stage import Stage

SAMPLERS = ("fifo", "prioritized")
SHARDS = (1, 2, 4)
LEASES = 30
LEASED = 8
"""Groups in a lease: few, so that even the smallest ledger has enough for all the leases."""
AT_ONCE = 20
"""Few, because they all come from one shard, the next ones from another."""
TASKS = 1000


@dataclass
class Filled:
    """A ledger with ready groups, and what its leases took."""

    name: str
    ledger: Ledger
    lease_s: list[float]


def leases(stage: Stage, *, ready: Sequence[int]) -> list[Figure]:
    """The time of a lease by the number of ready groups, for each sampler; and by the number of shards."""
    figures = []
    for sampler in SAMPLERS:
        configs = {f"{count:,} ready": (stage.config(sampler=sampler, backlog=None), count) for count in ready}
        found = asyncio.run(_measure(stage, configs))
        figures += [Figure(f"lease, {sampler}, {name}", 1000 * took_s, "ms") for name, took_s in found.items()]
        ratio = found[f"{ready[-1]:,} ready"] / found[f"{ready[0]:,} ready"]
        figures.append(Figure(f"lease, {sampler}, {ready[-1]:,} / {ready[0]:,} ready", ratio, "", Goal("<", 1.5)))
    configs = {f"{shards} shards": (stage.config(shards=shards, backlog=None), ready[0]) for shards in SHARDS}
    found = asyncio.run(_measure(stage, configs))
    return figures + [Figure(f"lease, fifo, {name}", 1000 * took_s, "ms") for name, took_s in found.items()]


def shards(stage: Stage, *, groups: int, answers: int, tokens: int) -> list[Figure]:
    """Throughput of the group path by the number of shards, all of them on one Redis."""
    figures = []
    for count in SHARDS:
        with line(stage, stage.config(shards=count)) as road:
            passage = road.passage(groups, answers=answers, tokens=tokens)
        figures.append(Figure(f"group path, {count} shards", passage.groups_per_s, "/s"))
    return figures


async def _measure(stage: Stage, configs: dict[str, tuple[RunConfig, int]]) -> dict[str, float]:
    """The median time of a lease in each ledger; they take turns, so that the machine's moods hit all alike."""
    filled = []
    async with connect_async(stage.config().redis) as redis:
        for name, (config, ready) in configs.items():
            filled.append(Filled(name, Ledger(redis, config), []))
            await _fill(stage, filled[-1].ledger, config.buffer.sampler, ready)
        for step in range(LEASES):
            stage.go_on()
            for each in filled:
                started = time.perf_counter()
                lease = await each.ledger.lease(step, consuming_version=0, count=LEASED)
                each.lease_s.append(time.perf_counter() - started)
                assert lease is not None, f"{each.name}: too few groups are ready for {LEASES} leases"
                await each.ledger.train(step)
        await redis.flushdb()
    return {each.name: median(each.lease_s) for each in filled}


async def _fill(stage: Stage, ledger: Ledger, sampler: SamplerConfig, ready: int) -> None:
    rng = np.random.default_rng(0)
    await ledger.join("bench", "bench")
    done = 0
    while done < ready:
        stage.go_on()
        granted = await ledger.issue("bench", server_version=0, credits=min(AT_ONCE, ready - done), train_tasks=TASKS)
        tasks = granted.tasks
        assert tasks, f"the ledger issues no more than {done} tickets"
        await ledger.deliver(
            [
                DeliveredGroup(
                    id=task.id,
                    blob=b"bytes",
                    oldest_version=0,
                    order=order(
                        sampler, number=int(task.id), oldest_version=0, rewards=rng.random(2).tolist(), rng=rng
                    ),
                    facts=Facts(tokens=1, delivered={1: 1}, kept={1: 1}),
                )
                for task in tasks
            ]
        )
        done += len(tasks)
