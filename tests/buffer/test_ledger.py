"""A ledger of several shards: what they share, and what one of them does for all."""

import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from redis.asyncio import Redis

from slipstream.buffer.policies.sampling import Order
from slipstream.buffer.store.keys import shard_of, shard_prefix
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.shard import RedisStore
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
    assert await ledger.deliver([group(id) for id in ids]) == dict.fromkeys(ids, "ready")


async def test_a_servers_credits_are_those_in_all_shards_together(redis: Redis, make_config: MakeConfig) -> None:
    ledger = Ledger(redis, make_config(shards=SHARDS))
    assert len(await issued(ledger, 3)) == 3
    assert len(await issued(ledger, 5)) == 2


async def test_the_shards_take_turns_at_being_asked_for_a_ticket_first(redis: Redis, make_config: MakeConfig) -> None:
    ledger = Ledger(redis, make_config(shards=SHARDS))
    ids = [group_id for credits in (1, 2, 3, 4) for group_id in await issued(ledger, credits)]
    assert sorted(shard_of(group_id, SHARDS) for group_id in ids) == [0, 0, 1, 1]


async def test_each_shard_keeps_to_its_share_of_the_rate_limit(redis: Redis, make_config: MakeConfig) -> None:
    limiter = {"samples_per_insert": 1.0, "tolerance": 4.0, "max_uses": 3}
    ledger = Ledger(redis, make_config(shards=SHARDS, limiter=limiter))
    ids = await issued(ledger, 100)
    assert len(ids) == 4, "insertions may be ahead by 4"
    await deliver(ledger, ids)
    for step in range(2):
        assert await ledger.lease(step, consuming_version=0, count=4) is not None
        await ledger.train(step)
    await ledger.publish(1, evaluate=False)  # there is room again, so that further groups are waited for
    assert await ledger.lease(2, consuming_version=0, count=4) is None, "leases are ahead by 4"


async def test_the_first_lease_waits_for_each_shards_share_of_the_groups(redis: Redis, make_config: MakeConfig) -> None:
    ledger = Ledger(redis, make_config(shards=SHARDS, limiter={"min_ready": 5}))
    ids = await issued(ledger, 100)
    of_shards = [[id for id in ids if shard_of(id, SHARDS) == shard] for shard in range(SHARDS)]
    await deliver(ledger, [id for mine in of_shards for id in mine[:2]])
    assert await ledger.lease(0, consuming_version=0, count=4) is None
    await deliver(ledger, [id for mine in of_shards for id in mine[2:3]])
    assert await ledger.lease(0, consuming_version=0, count=4) is not None


async def test_evaluations_are_the_first_shards_alone(redis: Redis, make_config: MakeConfig) -> None:
    config = make_config(shards=SHARDS)
    await Ledger(redis, config).publish(1, evaluate=True)
    first, other = (RedisStore(redis, config.run.name, shard=shard, shards=SHARDS) for shard in range(SHARDS))
    assert (await first.standing()).evaluating == 1
    assert ((await other.standing()).version, (await other.standing()).evaluating) == (1, None)


def seeded(config: RunConfig, seed: int) -> RunConfig:
    """The same settings with another seed, for a run of its own."""
    run = config.run.model_copy(update={"name": uuid.uuid4().hex, "seed": seed})
    return config.model_copy(update={"run": run})


async def raced_anew(redis: Redis, config: RunConfig, weights: Sequence[float]) -> dict[str, float]:
    """Where groups of these weights stand in the race after their first use, the first one first."""
    ledger = Ledger(redis, config)
    ids = await issued(ledger, len(weights))
    raced = [Order(key=1.0, raced=True, weight=weight) for weight in weights]
    await ledger.deliver([group(id, order=order) for id, order in zip(ids, raced, strict=True)])
    assert await ledger.lease(0, consuming_version=0, count=len(weights)) is not None
    await ledger.train(0)
    places: list[Any] = await redis.zrange(f"{shard_prefix(config.run.name, 0)}:ready", 0, -1, withscores=True)
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
