"""Sampling in the ledger: order of leases, reuse, rate limit, lengths."""

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from slipstream.buffer.policies.admission import bounds
from slipstream.buffer.policies.sampling import Order, order
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import run_prefix
from slipstream.buffer.store.types import LeasedGroups, TicketRequest
from slipstream.configs import RunConfig
from slipstream.configs.schema.buffer import LimiterConfig, SamplerConfig, smallest_tolerance
from tests.buffer.conftest import MakeConfig
from tests.buffer.ledger import (
    TRAIN_TASKS,
    counts,
    deliver,
    fail,
    group,
    issue,
    lease,
    ledger,
    ready,
    ruled,
    states,
)
from tests.buffer.policies.limits import may_insert, may_lease


async def test_lease_follows_sampler_keys(store: Ledger) -> None:
    ids = [task.id for task in await issue(store, 4, max_staleness=9)]
    keys = [3.0, -1.0, 2.0, 0.5]
    await store.deliver(
        [group(id, order=Order(key=key, raced=False, weight=1.0)) for id, key in zip(ids, keys, strict=True)]
    )
    assert await lease(store, 0, 2) == [ids[1], ids[3]]
    assert await lease(store, 1, 2) == [ids[2], ids[0]]


async def test_later_key_starts_at_race_position(store: Ledger) -> None:
    ids = [task.id for task in await issue(store, 4, max_staleness=9)]
    orders = [Order(key=key, raced=True, weight=2.0) for key in (5.0, 9.0, 3.0, 4.5)]
    await store.deliver([group(id, order=order) for id, order in zip(ids[:2], orders[:2], strict=True)])
    assert await lease(store, 0, 1, max_staleness=9) == [ids[0]]
    await store.deliver([group(id, order=order) for id, order in zip(ids[2:], orders[2:], strict=True)])
    assert await lease(store, 1, 3) == [ids[2], ids[1], ids[3]], "5 + 3 < 9 < 5 + 4.5"


async def test_race_position_never_decreases(store: Ledger) -> None:
    ids = [task.id for task in await issue(store, 4, max_staleness=9)]
    orders = [Order(key=key, raced=True, weight=1.0) for key in (1.0, 2.0, 3.0, 1.5)]
    await store.deliver([group(id, order=order) for id, order in zip(ids[:3], orders[:3], strict=True)])
    for step in range(2):
        await lease(store, step, 1)
        await store.train(step)
    await store.restart(0, learner="learner 9")
    assert await lease(store, 0, 1) == ids[:1]
    await store.deliver([group(ids[3], order=orders[3])])
    assert await lease(store, 1, 3) == [ids[1], ids[2], ids[3]], "it enters at 2"


@pytest.mark.parametrize(("raced", "key"), [(True, 9.0), (False, -9.0)])
async def test_reused_group_gets_new_race_key(store: Ledger, raced: bool, key: float) -> None:
    used, waiting = [task.id for task in await issue(store, 2)]
    orders = [Order(key=each, raced=raced, weight=1.0) for each in (key, key + 1e-6)]
    await store.deliver([group(id, order=order) for id, order in zip((used, waiting), orders, strict=True)])
    assert await lease(store, 0, 1) == [used]
    await ruled(store, max_uses=2).train(0)
    assert await lease(store, 1, 2) == ([waiting, used] if raced else [used, waiting])


async def test_min_ready_delays_leases(store: Ledger) -> None:
    limiter = LimiterConfig(min_ready=3)
    ids = await ready(store, 2)
    assert await lease(store, 0, 2, limiter=limiter) == []
    more = await ready(store, 1)
    assert await lease(store, 0, 2, limiter=limiter) == ids
    await store.train(0)
    assert await lease(store, 1, 1, limiter=limiter) == more, "groups count after their use too"


@settings(max_examples=40, deadline=None)
@given(
    ratio=st.sampled_from([0.1, 0.5, 1.0, 1.5, 2.0]),
    spare=st.sampled_from([0.0, 1.0, 3.5]),
    operations=st.lists(
        st.tuples(st.sampled_from(["issue", "deliver", "lease", "train"]), st.integers(1, 9)), min_size=8, max_size=40
    ),
)
@example(ratio=0.1, spare=0.0, operations=[("issue", 3), ("issue", 9)])  # 3 * 0.1 > 0.3
@example(  # 1.4 - 4 < -(1.4 + 1.2)
    ratio=0.7, spare=1.2, operations=[("issue", 2), ("deliver", 2), ("lease", 1), ("train", 1), ("lease", 1)]
)
def test_scripts_match_limiter(redis_url: str, ratio: float, spare: float, operations: list[tuple[str, int]]) -> None:
    asyncio.run(follow_the_limiter(redis_url, ratio, spare, operations))


async def follow_the_limiter(redis_url: str, ratio: float, spare: float, operations: list[tuple[str, int]]) -> None:
    """Does as operationed, and compares with the rule in Python each time."""
    least = smallest_tolerance(samples_per_insert=ratio, groups_per_step=2)
    limiter = LimiterConfig(samples_per_insert=ratio, tolerance=least + spare)
    limits = bounds(limiter)
    in_flight: list[str] = []
    uses: dict[str, int] = {}  # of the stored groups
    leases: list[list[str]] = []
    arrived = steps = 0
    async with Redis.from_url(redis_url) as redis:
        store = ledger(redis, uuid.uuid4().hex)
        for operation, count in operations:
            held = [id for of_step in leases for id in of_step]
            samples = sum(uses.values()) + len(held)
            match operation:
                case "issue":
                    credits = len(in_flight) + count
                    issued = await issue(store, credits, max_staleness=10**6, limiter=limiter)
                    inserts = len(uses) + len(in_flight)
                    allowed = [
                        n for n in range(count + 1) if may_insert(limits, inserts=inserts, samples=samples, count=n)
                    ]
                    assert len(issued) == max(allowed, default=0)
                    in_flight += [task.id for task in issued]
                case "deliver":
                    some, in_flight = in_flight[:count], in_flight[count:]
                    await deliver(store, some)
                    uses |= dict.fromkeys(some, 0)
                    arrived += len(some)
                case "lease":
                    got = await lease(store, steps + len(leases), 2, max_staleness=10**6, limiter=limiter)
                    due = may_lease(limits, arrived=arrived, inserts=len(uses), samples=samples, count=2)
                    assert bool(got) == (due and len(uses) - len(held) >= 2)
                    leases += [got] if got else []
                case "train" if leases:
                    await ruled(store, max_uses=2).train(steps)
                    steps += 1
                    for id in leases.pop(0):
                        uses[id] += 1
                        if uses[id] == 2:
                            del uses[id]


async def test_groups_expired_by_lease_do_not_count(store: Ledger) -> None:
    limiter = LimiterConfig(samples_per_insert=1.0, min_ready=1)
    await ready(store, 2)
    await store.publish(1, evaluate=False)
    await ready(store, 1, oldest_version=1)
    assert await lease(store, 0, 1, consuming_version=2, limiter=limiter) == []
    assert await states(store) == {"ready": 1, "expired": 2}


@pytest.mark.parametrize(("ratio", "max_uses"), [(0.5, 1), (1.0, 2), (2.0, 4)])
async def test_max_uses_above_ratio_does_not_deadlock(store: Ledger, ratio: float, max_uses: int) -> None:
    limiter = LimiterConfig(samples_per_insert=ratio, tolerance=2 * max(1.0, ratio))
    for step in range(20):
        got: list[str] = []
        while not got:
            issued = await issue(store, 9, server_version=step, groups_per_version=2, limiter=limiter)
            await deliver(store, [task.id for task in issued], oldest_version=step)
            got = await lease(store, step, 2, consuming_version=step, groups_per_version=2, limiter=limiter)
            assert issued or got, f"deadlock at step {step}"
        await ruled(store, max_uses=max_uses).train(step)
        await store.publish(step + 1, evaluate=False)


async def test_lease_waits_only_while_groups_may_come(store: Ledger) -> None:
    limiter = LimiterConfig(samples_per_insert=1.0, tolerance=1.0, min_ready=4)
    ids = [task.id for task in await issue(store, 9, max_staleness=0, groups_per_version=3, limiter=limiter)]
    assert len(ids) == 3
    await deliver(store, ids[:2])
    assert await lease(store, 0, 2, max_staleness=0, groups_per_version=3, limiter=limiter) == []
    await fail(store, ids[2])
    assert await lease(store, 0, 2, max_staleness=0, groups_per_version=3, limiter=limiter) == []
    (last,) = await issue(store, 9, max_staleness=0, groups_per_version=3, limiter=limiter)
    await deliver(store, [last.id])
    assert await lease(store, 0, 2, max_staleness=0, groups_per_version=3, limiter=limiter) == ids[:2]


# --- lengths ---------------------------------------------------------------------------------------------------------


async def test_lengths_of_trained_and_dropped(store: Ledger) -> None:
    await store.publish(1, evaluate=False)
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


def seeded(config: RunConfig, seed: int) -> RunConfig:
    """The same settings with another seed, for a run of its own."""
    run = config.run.model_copy(update={"name": uuid.uuid4().hex, "seed": seed})
    return config.model_copy(update={"run": run})


async def reuse_keys(redis: Redis, config: RunConfig, weights: Sequence[float]) -> dict[str, float]:
    """Sampler keys of groups with these weights after their first use, in ascending order."""
    ledger = Ledger(redis, config)
    await ledger.join("r0", "first")
    request = TicketRequest("r0", version=0, credits=len(weights), tickets=len(weights))
    ids = [task.id for task in (await ledger.issue([request], train_tasks=TRAIN_TASKS))[0]]
    raced = [Order(key=1.0, raced=True, weight=weight) for weight in weights]
    await ledger.deliver([group(id, order=order) for id, order in zip(ids, raced, strict=True)])
    assert await ledger.lease(0, consuming_version=0, count=len(weights)) is not None
    await ledger.train(0)
    places: list[Any] = await redis.zrange(f"{run_prefix(config.run.name)}:ready", 0, -1, withscores=True)
    return {id.decode(): place for id, place in places}


async def test_reused_groups_are_keyed_by_seed(redis: Redis, make_config: MakeConfig) -> None:
    config = make_config(limiter={"max_uses": 2}, max_staleness=3)
    first, again, other = [await reuse_keys(redis, seeded(config, seed), [1.0] * 8) for seed in (0, 0, 1)]
    assert len(first) == 8
    assert first == again
    assert not set(first.values()) & set(other.values())


@pytest.mark.parametrize("seed", range(3))
async def test_reused_groups_are_keyed_by_weight(redis: Redis, make_config: MakeConfig, seed: int) -> None:
    config = seeded(make_config(limiter={"max_uses": 2}, max_staleness=3), seed)
    places = await reuse_keys(redis, config, [1e-6, 1e6] * 4)
    assert [int(id) % 2 for id in places] == [0] * 4 + [1] * 4, "heavy ones first"


# --- importance weights ----------------------------------------------------------------------------------------------

SAMPLER = SamplerConfig(name="prioritized")
SPREADS = np.array([0.0, 0.05, 0.1, 0.2, 0.2, 0.3, 0.4, 0.5, 0.5, 0.6, 0.8, 1.0])
VALUES = np.array([0.0, *np.linspace(0.2, 1.4, len(SPREADS) - 1)])
"""A quantity of each group, such as its loss: 0 without spread."""
RUNS, LEASES, LEASED = 300, 3, 4


async def raced(redis: Redis, *, seed: int = 0, max_uses: int = 1) -> Ledger:
    """A ledger with tickets for groups of these spreads of rewards; a group's id is its place among the spreads + 1."""
    store = ledger(redis, uuid.uuid4().hex, max_staleness=100, importance_exponent=1.0, seed=seed, max_uses=max_uses)
    assert len(await issue(store, len(SPREADS), max_staleness=100)) == len(SPREADS)
    return store


async def deliver_raced(store: Ledger, rng: np.random.Generator, places: Sequence[int]) -> None:
    orders = [
        order(SAMPLER, number=place, oldest_version=0, rewards=[-SPREADS[place], SPREADS[place]], rng=rng)
        for place in places
    ]
    await store.deliver([group(str(place + 1), order=each) for place, each in zip(places, orders, strict=True)])


async def drawn(store: Ledger, step: int, count: int) -> LeasedGroups:
    found = await store.lease(step, consuming_version=0, count=count)
    assert found is not None
    return found


async def estimate_error(store: Ledger, step: int, count: int) -> float:
    """Error of the Horvitz-Thompson estimate of the ready groups' mean value, from those that a lease draws."""
    prefix = run_prefix(store.run)
    ready_ids: Any = await store._redis.zrange(f"{prefix}:ready", 0, -1)
    lease = await drawn(store, step, count)
    exposures = [float(await store._redis.hget(f"{prefix}:about:{id}", "exposure") or 0) for id in lease.ids]
    probabilities = -np.expm1(-np.array(exposures))
    assert np.ptp(np.log(lease.importance_weights * probabilities)) == pytest.approx(0, abs=1e-9)
    values = VALUES[[int(id) - 1 for id in lease.ids]]
    return float((values / probabilities).sum() / len(ready_ids) - VALUES[[int(id) - 1 for id in ready_ids]].mean())


async def test_probabilities_of_draws_estimate_ready_groups(redis: Redis) -> None:
    """The mean of the estimates is that of all ready groups: at first, after arrivals and reuse, and at the end."""
    rng, errors = np.random.default_rng(7), np.zeros((RUNS, LEASES))
    for run in range(RUNS):
        store = await raced(redis, seed=run, max_uses=2)
        await deliver_raced(store, rng, range(0, 12, 2))
        errors[run, 0] = await estimate_error(store, 0, LEASED)
        await store.train(0)
        await deliver_raced(store, rng, range(1, 12, 2))
        errors[run, 1] = await estimate_error(store, 1, LEASED)
        await store.train(1)
        errors[run, 2] = await estimate_error(store, 2, (await counts(store)).ready)
    standard_errors = errors.std(axis=0, ddof=1) / np.sqrt(RUNS)
    assert (np.abs(errors.mean(axis=0)) < 3 * standard_errors + 1e-12).all()
    assert (standard_errors < 0.03).all(), "a bias of a tenth of the mean would show"
    assert np.abs(errors[:, -1]).max() < 1e-12, "the last lease takes everything"


async def test_lease_of_everything_weighs_all_alike(redis: Redis) -> None:
    store = await raced(redis)
    await deliver_raced(store, np.random.default_rng(0), range(12))
    assert (await drawn(store, 0, 12)).importance_weights == [1.0] * 12


async def test_returned_groups_keep_weights_of_their_draw(redis: Redis) -> None:
    store = await raced(redis)
    await deliver_raced(store, np.random.default_rng(2), range(12))
    first, second = await drawn(store, 0, LEASED), await drawn(store, 1, LEASED)
    assert len(set(first.importance_weights)) > 1
    assert await drawn(store, 0, LEASED) == first, "a repeated request"
    await store.train(0)
    assert await store.restart(0, learner="learner 1") == (2 * LEASED, 0)
    assert await drawn(store, 0, LEASED) == first
    assert await drawn(store, 1, LEASED) == second
