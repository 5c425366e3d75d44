"""A ledger of several shards: what they share, and what one of them does for all."""

import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from redis.asyncio import Redis

from slipstream.buffer.policies.sampling import Order
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.scripts import run_prefix
from slipstream.configs import RunConfig
from tests.buffer.conftest import MakeConfig
from tests.buffer.ledger import TRAIN_TASKS, group

SHARDS = 2


async def issued(ledger: Ledger, credits: int) -> list[str]:
    """To one server, all that it may have."""
    await ledger.join("r0", "first")
    granted = await ledger.issue("r0", server_version=0, credits=credits, train_tasks=TRAIN_TASKS)
    return [task.id for task in granted.tasks]


async def deliver(ledger: Ledger, ids: Sequence[str]) -> None:
    assert await ledger.deliver([group(id) for id in ids]) == ["ready"] * len(ids)


def seeded(config: RunConfig, seed: int) -> RunConfig:
    """The same settings with another seed, for a run of its own."""
    run = config.run.model_copy(update={"name": uuid.uuid4().hex, "seed": seed})
    return config.model_copy(update={"run": run})


async def raced_anew(redis: Redis, config: RunConfig, weights: Sequence[float]) -> dict[str, float]:
    """Where groups of these weights stand in the race after their first use, the first one first."""
    ledger = Ledger.from_config(redis, config)
    ids = await issued(ledger, len(weights))
    raced = [Order(key=1.0, raced=True, weight=weight) for weight in weights]
    await ledger.deliver([group(id, order=order) for id, order in zip(ids, raced, strict=True)])
    assert await ledger.lease(0, consuming_version=0, count=len(weights)) is not None
    await ledger.train(0)
    places: list[Any] = await redis.zrange(f"{run_prefix(config.run.name)}:ready", 0, -1, withscores=True)
    return {id.decode(): place for id, place in places}


async def test_groups_that_are_used_again_race_by_the_runs_seed(redis: Redis, make_config: MakeConfig) -> None:
    config = make_config(limiter={"max_uses": 2})
    first, again, other = [await raced_anew(redis, seeded(config, seed), [1.0] * 8) for seed in (0, 0, 1)]
    assert len(first) == 8
    assert first == again
    assert not set(first.values()) & set(other.values())


@pytest.mark.parametrize("seed", range(3))
async def test_groups_that_are_used_again_race_by_their_weights(
    redis: Redis, make_config: MakeConfig, seed: int
) -> None:
    config = seeded(make_config(limiter={"max_uses": 2}), seed)
    places = await raced_anew(redis, config, [1e-6, 1e6] * 4)
    assert [int(id) % 2 for id in places] == [0] * 4 + [1] * 4, "all the heavy ones, then the light ones"
