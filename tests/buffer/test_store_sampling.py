"""Which groups the ledger leases first, how often, and what it knows of their lengths."""

import asyncio
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from slipstream.buffer.policies.limiter import bounds
from slipstream.buffer.policies.sampling import Order
from slipstream.buffer.records import Leased
from slipstream.buffer.store import RedisStore
from slipstream.configs.schema.limiter import LimiterConfig, smallest_tolerance
from tests.buffer.ledger import (
    LATER_S,
    TRAIN_TASKS,
    counts,
    deliver,
    fail,
    group,
    issue,
    lease,
    leased,
    ready,
    states,
)
from tests.buffer.policies.limits import may_insert, may_lease

# --- sampling and the rate limit -----------------------------------------------------------------------------------


async def test_a_lease_follows_the_samplers_keys(store: RedisStore) -> None:
    ids = [task.id for task in await issue(store, 4, max_staleness=9)]
    keys = [3.0, -1.0, 2.0, 0.5]
    await store.deliver(
        [group(id, order=Order(key=key, raced=False, weight=1.0)) for id, key in zip(ids, keys, strict=True)]
    )
    assert await lease(store, 0, 2) == [ids[1], ids[3]]
    assert await lease(store, 1, 2) == [ids[2], ids[0]]


async def test_who_enters_the_race_later_starts_where_it_stands(store: RedisStore) -> None:
    ids = [task.id for task in await issue(store, 4, max_staleness=9)]
    orders = [Order(key=key, raced=True, weight=2.0) for key in (5.0, 9.0, 3.0, 4.5)]
    await store.deliver([group(id, order=order) for id, order in zip(ids[:2], orders[:2], strict=True)])
    first = await store.lease(
        0, consuming_version=0, count=1, max_staleness=9, deadline_s=LATER_S, groups_per_version=4
    )
    assert first == Leased([ids[0]], [2.0])
    await store.deliver([group(id, order=order) for id, order in zip(ids[2:], orders[2:], strict=True)])
    assert await lease(store, 1, 3) == [ids[2], ids[1], ids[3]], "5 + 3 < 9 < 5 + 4.5"


async def test_the_race_does_not_run_backwards_when_groups_that_won_come_back(store: RedisStore) -> None:
    ids = [task.id for task in await issue(store, 4, max_staleness=9)]
    orders = [Order(key=key, raced=True, weight=1.0) for key in (1.0, 2.0, 3.0, 1.5)]
    await store.deliver([group(id, order=order) for id, order in zip(ids[:3], orders[:3], strict=True)])
    for step in range(2):
        await lease(store, step, 1)
        await store.train(step)
    await store.restart(0, learner="learner 9")
    assert await lease(store, 0, 1) == ids[:1]
    await store.deliver([group(ids[3], order=orders[3])])
    assert await lease(store, 1, 3) == [ids[1], ids[2], ids[3]], "it enters at 2, and not at 1"


async def test_a_group_with_uses_left_is_ready_again_and_retired_when_it_is_too_stale(store: RedisStore) -> None:
    ids = await leased(store, 0, 2)
    await store.train(0, max_uses=3)
    assert await states(store) == {"ready": 2}
    assert await lease(store, 1, 2) == ids
    await store.train(1, max_uses=3)
    assert await lease(store, 2, 2, consuming_version=2) == []
    assert await states(store) == {"trained": 2}, "not expired: they were trained on"
    assert (await counts(store)).uses == 4
    assert await store.restart(1, learner="learner 7") == (2, 0)
    assert (await counts(store)).uses == 2
    assert await store.verify(TRAIN_TASKS) == []


async def test_nothing_is_leased_before_enough_groups_are_in(store: RedisStore) -> None:
    limits = bounds(LimiterConfig(min_ready=3))
    ids = await ready(store, 2)
    assert await lease(store, 0, 2, bounds=limits) == []
    more = await ready(store, 1)
    assert await lease(store, 0, 2, bounds=limits) == ids
    assert await lease(store, 1, 1, bounds=limits) == more, "what was in counts for ever"


@settings(max_examples=40, deadline=None)
@given(
    ratio=st.sampled_from([0.5, 1.0, 1.5, 2.0]),
    spare=st.sampled_from([0.0, 1.0, 3.5]),
    wishes=st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=25),
)
def test_the_scripts_keep_to_the_rate_limit(
    redis_url: str, ratio: float, spare: float, wishes: list[tuple[bool, int]]
) -> None:
    asyncio.run(follow_the_limiter(redis_url, ratio, spare, wishes))


async def follow_the_limiter(redis_url: str, ratio: float, spare: float, wishes: list[tuple[bool, int]]) -> None:
    """Issues and leases as wished, and compares with the rule in Python each time."""
    least = smallest_tolerance(samples_per_insert=ratio, groups_per_step=2)
    limits = bounds(LimiterConfig(samples_per_insert=ratio, tolerance=least + spare))
    assert limits is not None
    async with Redis.from_url(redis_url) as redis:
        store = RedisStore(redis, uuid.uuid4().hex)
        arrived = inserts = samples = step = 0
        for insert, count in wishes:
            if insert:
                issued = await issue(store, count, max_staleness=10**6, bounds=limits)
                allowed = [n for n in range(count + 1) if may_insert(limits, inserts=inserts, samples=samples, count=n)]
                assert len(issued) == max(allowed, default=0)
                await deliver(store, [task.id for task in issued])
                arrived, inserts = arrived + len(issued), inserts + len(issued)
                continue
            got = await lease(store, step, 2, max_staleness=10**6, bounds=limits)
            due = may_lease(limits, arrived=arrived, inserts=inserts, samples=samples, count=2)
            assert bool(got) == (due and inserts >= 2)
            if got:
                step += 1
                await store.train(step - 1, max_uses=2)
                gone = inserts - (await counts(store)).ready
                inserts, samples = inserts - gone, samples + 2 - 2 * gone


async def test_what_expires_counts_neither_as_inserted_nor_as_sampled(store: RedisStore) -> None:
    limits = bounds(LimiterConfig(samples_per_insert=1.0, tolerance=2.0))
    await deliver(store, [task.id for task in await issue(store, 9, max_staleness=99, bounds=limits)])
    assert await states(store) == {"ready": 2}
    assert await issue(store, 9, max_staleness=99, bounds=limits) == []
    assert await lease(store, 0, 2, consuming_version=5, bounds=limits) == []
    assert len(await issue(store, 9, max_staleness=99, bounds=limits)) == 2


@pytest.mark.parametrize(("ratio", "max_uses"), [(0.5, 1), (1.0, 2), (2.0, 4)])
async def test_a_run_whose_groups_may_be_used_more_often_than_they_are_held_to_goes_on(
    store: RedisStore, ratio: float, max_uses: int
) -> None:
    limits = bounds(LimiterConfig(max_uses=max_uses, samples_per_insert=ratio, tolerance=2 * max(1.0, ratio)))
    for step in range(20):
        got: list[str] = []
        while not got:
            issued = await issue(store, 9, server_version=step, groups_per_version=2, bounds=limits)
            await deliver(store, [task.id for task in issued], oldest_version=step)
            got = await lease(store, step, 2, consuming_version=step, groups_per_version=2, bounds=limits)
            assert issued or got, f"stands still at step {step}"
        await store.train(step, max_uses=max_uses)
        await store.publish(step + 1, evaluate=False)


async def test_a_lease_waits_for_groups_only_while_some_may_come(store: RedisStore) -> None:
    limits = bounds(LimiterConfig(samples_per_insert=1.0, tolerance=1.0, min_ready=4))
    ids = [task.id for task in await issue(store, 9, max_staleness=0, groups_per_version=3, bounds=limits)]
    assert len(ids) == 3, "admission lets in no more"
    await deliver(store, ids[:2])
    assert await lease(store, 0, 2, max_staleness=0, groups_per_version=3, bounds=limits) == []
    await fail(store, ids[2])
    assert await lease(store, 0, 2, max_staleness=0, groups_per_version=3, bounds=limits) == []
    (last,) = await issue(store, 9, max_staleness=0, groups_per_version=3, bounds=limits)
    await deliver(store, [last.id])
    assert await lease(store, 0, 2, max_staleness=0, groups_per_version=3, bounds=limits) == ids[:2]


# --- lengths ---------------------------------------------------------------------------------------------------------


async def test_the_lengths_of_what_is_trained_and_dropped_are_known(store: RedisStore) -> None:
    (short,) = await ready(store, 1, length=2, oldest_version=1)
    (long,) = await ready(store, 1, length=50)
    assert await lease(store, 0, 1, consuming_version=2) == [short]
    await store.train(0)
    lengths = await store.lengths(["too_stale"])
    assert lengths == {"delivered": {2: 1, 50: 1}, "trained": {2: 1}, "too_stale": {50: 1}}
    assert (await counts(store)).answers_dropped == {"too_stale": 1}
    await store.restart(0, learner="learner 8")
    assert (await store.lengths([]))["trained"] == {2: 0}
    assert long not in await lease(store, 0, 1)
