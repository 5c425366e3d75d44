"""Transitions of the ledger on a real server: tickets, deliveries, leases, end of the run.

`test_ledger_interleavings` covers their combinations; here are the details that its model leaves out.
"""

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import group_key, run_prefix, set_all
from slipstream.buffer.wire.messages import LedgerCounts
from tests.buffer.ledger import (
    AT_ONCE_S,
    LATER_S,
    counts,
    deliver,
    fail,
    group,
    heartbeat,
    issue,
    lease,
    leased,
    ledger,
    ready,
    ruled,
    states,
    sweep,
    tickets_of,
)


@pytest.mark.parametrize("limit", [("STORED_AT_ONCE", 2), ("STORED_AT_ONCE_BYTES", 1)])
async def test_large_delivery_is_stored_in_batches(
    store: Ledger, redis: Redis, run_name: str, monkeypatch: pytest.MonkeyPatch, limit: tuple[str, int]
) -> None:
    monkeypatch.setattr(f"slipstream.buffer.store.ledger.{limit[0]}", limit[1])
    ids = [task.id for task in await issue(store, 5, max_staleness=9)]
    await deliver(store, ids[1:2])
    assert await deliver(store, [*ids, "999"]) == ["ready", "duplicate", "ready", "ready", "ready", "void"]
    stored = await redis.mget([group_key(run_name, group_id) for group_id in ids])
    assert stored == [group(group_id).blob for group_id in ids]
    assert await store.verify() == []


@pytest.mark.parametrize(
    ("server_version", "max_staleness", "expected"), [(1, 1, 0), (2, 1, 4), (3, 1, 8), (50, 1, 8), (2, 0, 0), (3, 0, 4)]
)
async def test_capacity_depends_on_server_version(
    store: Ledger, server_version: int, max_staleness: int, expected: int
) -> None:
    await store.publish(3, evaluate=False)
    assert len(await issue(store, 100, server_version=server_version, max_staleness=max_staleness)) == expected


async def test_publish_of_known_version_changes_nothing(store: Ledger) -> None:
    await leased(store, 0, 4)
    await store.publish(2, evaluate=False)
    await store.train(0)
    for version in (2, 1):
        await store.publish(version, evaluate=False)
    assert await store.version() == 2
    assert await issue(store, 100, server_version=2, max_staleness=0) == []


async def test_returned_server_is_charged_for_held_tickets(store: Ledger) -> None:
    held, lost = [task.id for task in await issue(store, 2)]
    assert (await store.sweep(silent_s=0.0)).tickets == 2
    await store.join("r0", "first")
    for _ in range(2):
        assert await heartbeat(store, "r0", [held, "999"]) == 0
    assert await heartbeat(store, "r1", [lost]) == 0
    assert (await tickets_of(store, "r0"), await tickets_of(store, "r1")) == (1, 0)
    assert len(await issue(store, 2)) == 1
    assert await store.verify() == []
    await heartbeat(store, "r0", [])
    assert len(await issue(store, 2)) == 1


async def test_heartbeat_ends_silence(store: Ledger) -> None:
    await store.join("r0", "first")
    for _ in range(2):
        assert (await store.sweep(silent_s=0.0)).silent == ["r0"]
        await heartbeat(store, "r0", [])


async def test_silence_is_overridden_by_service(store: Ledger, redis: Redis, run_name: str) -> None:
    heard = f"{run_prefix(run_name)}:heard"
    await redis.zadd(heard, {"r0": 0.0, "r1": 0.0})
    assert (await store.sweep(silent_s=LATER_S, silences_s={"r0": 1.0, "forgotten": 1.0})).silent == ["r1"]
    assert await redis.zrange(heard, 0, -1) == [b"r0"]
    assert (await store.sweep(silent_s=LATER_S, silences_s={"r0": 2 * LATER_S})).silent == []
    assert (await store.sweep(silent_s=1.0)).silent == ["r0"]


async def test_silence_despite_clock_set_back(store: Ledger, redis: Redis, run_name: str) -> None:
    seconds, _ = await redis.time()
    await redis.zadd(f"{run_prefix(run_name)}:heard", {"r0": seconds + LATER_S})
    assert (await store.sweep(silent_s=0.0)).silent == ["r0"]


async def test_latest_outcome_of_task_counts(store: Ledger) -> None:
    ids = [task.id for task in await issue(store, 4)]
    for id, task, outcome in zip(ids, [7, 8, 7, 7], ["unsolved", "mixed", "mixed", "solved"], strict=True):
        facts = replace(group(id).facts, task=task, outcome=outcome)
        assert await store.deliver([replace(group(id), facts=facts)]) == ["ready"]
    assert (await store.snapshot()).tasks == {"mixed": 1, "solved": 1}


async def test_streak_counts_latest_equal_outcomes(store: Ledger) -> None:
    outcomes = ["unsolved", "solved", "solved", "mixed", "unsolved", "unsolved"]
    found = []
    for task, outcome in zip(await issue(store, 6), outcomes, strict=True):
        facts = replace(group(task.id).facts, task=7, outcome=outcome)
        if outcome == "mixed":
            await store.deliver([replace(group(task.id), facts=facts)] * 2)
        else:
            for _ in range(2):  # a repeated delivery does not count
                await store.filter(task.id, reason="dynamic_sampling", facts=facts)
        found += await store.streaks([7])
    assert found == [-1, 1, 2, 0, -1, -2]
    assert await store.streaks([8, 7]) == [0, -2]


async def test_redelivery_is_duplicate_in_every_state(store: Ledger, redis: Redis, run_name: str) -> None:
    (id,) = [task.id for task in await issue(store, 1)]
    first, second = group(id), replace(group(id), blob=b"other bytes")
    assert await store.deliver([first, second]) == ["ready", "duplicate"]
    assert await redis.get(group_key(run_name, id)) == first.blob
    for advance in (lambda: lease(store, 0, 1), lambda: store.train(0), lambda: store.durable(1)):
        assert await deliver(store, [id, id]) == ["duplicate", "duplicate"]
        await advance()
    assert await deliver(store, [id, "999"]) == ["duplicate", "void"]
    assert await arriving(redis, run_name) == []
    assert await states(store) == {"trained": 1, "durable": 1}
    assert (await counts(store)).tokens == 3


@pytest.mark.parametrize("id", ["999", "nobody's", "", "e0-0", "1 2"])
async def test_unrequested_group_is_void(store: Ledger, id: str) -> None:
    assert await deliver(store, [id]) == ["void"]
    assert await states(store) == {}


async def test_unstored_bytes_are_removed_with_ticket(store: Ledger, redis: Redis, run_name: str) -> None:
    (reissued,) = await issue(store, 1, deadline_s=AT_ONCE_S)
    (expired,) = await issue(store, 2)
    for task in (reissued, expired):
        await redis.set(f"{run_prefix(run_name)}:arriving:{task.id}", b"bytes")
    assert await sweep(store) == (1, 0)
    assert await fail(store, reissued.id) == "void"
    assert await arriving(redis, run_name) == [expired.id]
    await store.finish()
    assert await arriving(redis, run_name) == []


async def arriving(redis: Redis, run_name: str) -> list[str]:
    """The groups whose bytes have arrived and are not stored."""
    return [key.decode().rpartition(":")[2] async for key in redis.scan_iter(f"{run_prefix(run_name)}*:arriving:*")]


async def test_group_with_lost_bytes_is_requested_again(store: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, kept = (task.id for task in await issue(store, 2))

    async def set_all_but_one(redis: Redis, bytes_of: dict[str, bytes]) -> None:
        await set_all(redis, {name: blob for name, blob in bytes_of.items() if not name.endswith(f":{lost}")})

    with monkeypatch.context() as patched:
        patched.setattr("slipstream.buffer.store.ledger.set_all", set_all_but_one)
        assert await deliver(store, [lost, kept]) == ["again", "ready"]
    assert await states(store) == {"in_flight": 1, "ready": 1}
    assert await deliver(store, [lost, kept]) == ["ready", "duplicate"]


async def test_unpublished_version_is_refused(store: Ledger, redis: Redis, run_name: str) -> None:
    first, second = (task.id for task in await issue(store, 2))
    await store.publish(7, evaluate=False)
    assert await store.deliver([group(first, newest_version=8)]) == ["future"]
    assert await arriving(redis, run_name) == []
    await redis.hset(f"{run_prefix(run_name)}:meta", "version", "6")  # as after the loss of the file's end
    assert await ruled(store).deliver([group(first, newest_version=7)]) == ["future"]
    assert await store.deliver([group(first, newest_version=7), group(second, newest_version=6)]) == ["ready"] * 2
    assert await store.verify() == []


async def test_finish_expires_tickets(store: Ledger) -> None:
    await leased(store, 0, 2)
    (late,) = await issue(store, 1)
    assert await store.finish() == 1
    assert await states(store) == {"ready": 2, "expired": 1}
    assert (await counts(store)).reasons == {"expired:run_finished": 1}
    assert await issue(store, 100) == []
    assert await deliver(store, [late.id]) == ["finished"]
    assert await fail(store, late.id) == "finished"
    assert await store.finish() == 0


async def test_finished_run_continues_after_restart(store: Ledger) -> None:
    await store.finish()
    await store.restart(0, learner="learner 6")
    assert len(await issue(store, 2)) == 2


async def test_runs_are_isolated(store: Ledger, redis: Redis, run_name: str) -> None:
    await ready(store, 2)
    other = ledger(redis, f"{run_name}.other")
    assert await counts(other) == LedgerCounts()
    assert (await other.version(), (await other.snapshot()).evaluating) == (0, None)
    assert await lease(other, 0, 1) == []
    assert [task.position for task in await issue(other, 1)] == [0]
