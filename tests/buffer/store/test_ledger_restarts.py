"""A learner that restarts from a checkpoint: the staleness of what the undone versions generated, and repeated steps.

`test_ledger_interleavings` covers their combinations.
"""

from typing import Any

import pytest

from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import run_prefix
from slipstream.buffer.store.types import LeasedGroups
from tests.buffer.ledger import counts, deliver, group, issue, ruled

PER_STEP = 4
MAX_STALENESS = 2


@pytest.fixture
def store(store: Ledger) -> Ledger:
    """A ledger of a run that publishes after each step."""
    return ruled(store, max_staleness=MAX_STALENESS, groups_per_step=PER_STEP, groups_per_version=PER_STEP)


async def fill(store: Ledger, version: int) -> list[str]:
    """Servers of this version generate all groups that admission allows."""
    granted = await issue(store, 100, server_version=version, max_staleness=MAX_STALENESS, groups_per_version=PER_STEP)
    ids = [task.id for task in granted]
    assert await deliver(store, ids, oldest_version=version) == ["ready"] * len(ids)
    return ids


async def step(store: Ledger, number: int, version: int) -> LeasedGroups:
    """Trains on the groups that wait, and publishes the next version, with which servers generate."""
    lease = await store.lease(number, consuming_version=version, count=PER_STEP)
    assert lease is not None
    await store.train(number)
    await store.publish(version + 1, evaluate=False)
    await fill(store, version + 1)
    return lease


async def trained_run(store: Ledger, steps: int) -> list[LeasedGroups]:
    """A run of so many steps with full staleness: what is generated waits for MAX_STALENESS steps."""
    await store.publish(0, evaluate=False)
    await fill(store, 0)
    return [await step(store, number, number) for number in range(steps)]


async def restart(store: Ledger, name: str, done: int, *, version: int) -> None:
    """A learner starts from the checkpoint of `done` steps and of the version `done`; it publishes `version`."""
    await store.restart(done, learner=name, version=done)
    await store.publish(version, evaluate=False)


async def expired(store: Ledger) -> int:
    return (await counts(store)).expired


@pytest.mark.parametrize("done", [8, 5, 0])
async def test_restart_makes_no_group_more_stale(store: Ledger, done: int) -> None:
    leases = await trained_run(store, 8)
    assert {lease.staleness[0] for lease in leases} == {0, 1, 2}
    await restart(store, "another", done, version=9)
    again = [await step(store, number, 9 + number - done) for number in range(done, 8)]
    assert again == leases[done:], "the same groups, as stale as before"
    later = [await step(store, number, 9 + number - done) for number in range(8, 14)]
    assert {lease.staleness[0] for lease in later} == {MAX_STALENESS}
    assert await expired(store) == 0
    assert await store.verify() == []


async def test_repeated_restarts_lose_no_group(store: Ledger) -> None:
    await trained_run(store, 8)
    version = 8
    for number in range(12):
        version += 1
        await restart(store, f"learner {number}", 6, version=version)
        for again in range(6, 7 + number % 4):
            await step(store, again, version)
            version += 1
        assert await store.verify() == []
    assert await expired(store) == 0


async def test_nothing_is_issued_until_undone_weights_are_published(store: Ledger) -> None:
    await store.publish(0, evaluate=False)
    await store.publish(1, evaluate=False)
    await store.restart(0, learner="another", version=0)
    assert await fill(store, 1) == []
    await store.publish(2, evaluate=False)
    assert await fill(store, 2) != []
    await store.restart(0, learner="third", version=2)
    assert await fill(store, 2) == [], "full"
    await store.publish(3, evaluate=False)
    assert (await counts(store)).ready == PER_STEP * (MAX_STALENESS + 1)


async def test_group_of_undone_and_new_weights_is_as_stale_as_its_stalest_token(store: Ledger) -> None:
    """It was in flight while the weights of step 2 replaced those of step 6, and step 6 comes before its turn."""
    await trained_run(store, 6)
    (late, *_) = [task.id for task in await issue(store, 2, server_version=6, max_staleness=100)]
    await restart(store, "another", 2, version=7)
    assert await store.deliver([group(late, oldest_version=6, newest_version=7)]) == ["ready"]
    for number in range(2, 6):
        await step(store, number, 5 + number)
    assert await expired(store) == 1
    assert await store.verify() == []


@pytest.mark.parametrize(("done", "lost"), [(5, 0), (4, 0), (2, 2 * PER_STEP)])
async def test_undone_versions_that_are_not_repeated_are_far_away(store: Ledger, done: int, lost: int) -> None:
    """Groups of the first undone step are forgotten: what later undone versions generated is of another training."""
    await trained_run(store, 6)
    await store.durable(6)
    undone: list[Any] = await store.scripts.redis.zrangebyscore(f"{run_prefix(store.run)}:durable", done, done)
    assert await store.exported([undone[0].decode()], forget=True) == 1
    await restart(store, "another", done, version=7)
    lease = await store.lease(done, consuming_version=7, count=PER_STEP)
    known = {} if lease is None else lease.staleness_of
    assert {version: known[version] for version in known if version > done} == {
        version: version - done for version in known if version > done
    }
    assert all(staleness <= MAX_STALENESS for staleness in known.values())
    assert await expired(store) == lost
    assert await store.verify() == []
