"""The ledger's transitions, one by one, in a real server."""

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import set_all
from slipstream.buffer.store.scripts import group_key, run_prefix
from slipstream.buffer.wire.messages import LedgerCounts
from tests.buffer.ledger import (
    AT_ONCE_S,
    LATER_S,
    RULES,
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
    sweep,
    tickets_of,
)

# --- issued --------------------------------------------------------------------------------------------------------


async def test_a_new_ledger_is_empty(store: Ledger) -> None:
    assert await counts(store) == LedgerCounts()
    assert (await store.version(), (await store.snapshot()).evaluating) == (0, None)


async def test_tickets_go_through_all_tasks_before_the_next_epoch(store: Ledger) -> None:
    issued = await issue(store, TRAIN_TASKS + 2, max_staleness=9)
    assert [(task.epoch, task.position) for task in issued] == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)]
    assert len({task.id for task in issued}) == TRAIN_TASKS + 2
    assert await states(store) == {"in_flight": 7}


async def test_a_server_holds_no_more_tickets_than_its_credits(store: Ledger) -> None:
    first = await issue(store, 3, server="a")
    assert len(first) == 3
    assert await issue(store, 3, server="a") == []
    assert len(await issue(store, 2, server="b")) == 2, "credits are each server's own"
    await deliver(store, [first[0].id])
    await fail(store, first[1].id)
    assert len(await issue(store, 3, server="a")) == 2


@pytest.mark.parametrize("limit", [("STORED_AT_ONCE", 2), ("STORED_AT_ONCE_BYTES", 1)])
async def test_groups_of_a_delivery_too_large_to_be_stored_at_once_keep_their_order_and_outcomes(
    store: Ledger, redis: Redis, run_name: str, monkeypatch: pytest.MonkeyPatch, limit: tuple[str, int]
) -> None:
    monkeypatch.setattr(f"slipstream.buffer.store.ledger.{limit[0]}", limit[1])
    ids = [task.id for task in await issue(store, 5, max_staleness=9)]
    await deliver(store, ids[1:2])
    assert await deliver(store, [*ids, "999"]) == ["ready", "duplicate", "ready", "ready", "ready", "void"]
    stored = await redis.mget([group_key(run_name, group_id) for group_id in ids])
    assert stored == [group(group_id).blob for group_id in ids]
    assert await store.verify() == []


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_the_pipeline_never_holds_more_than_staleness_allows(store: Ledger, max_staleness: int) -> None:
    allowed = (max_staleness + 1) * 4
    ids = [task.id for task in await issue(store, 100, max_staleness=max_staleness)]
    assert len(ids) == allowed
    await deliver(store, ids[:3])
    await lease(store, 0, 2)
    assert await states(store) == {"in_flight": allowed - 3, "ready": 1, "leased": 2}
    assert await issue(store, 100, max_staleness=max_staleness) == [], "ready and leased groups count too"


async def test_trained_groups_make_room_only_when_the_version_they_made_is_published(store: Ledger) -> None:
    ids = [task.id for task in await issue(store, 100)]
    await deliver(store, ids[:4])
    await lease(store, 0, 4)
    await store.train(0)
    assert await issue(store, 100) == []
    await store.publish(1, evaluate=False)
    assert len(await issue(store, 100, server_version=1)) == 4


async def test_a_server_that_lags_behind_the_latest_version_gets_less(store: Ledger) -> None:
    await store.publish(3, evaluate=False)
    assert await issue(store, 100, server_version=1) == []
    assert len(await issue(store, 100, server_version=2)) == 4
    assert len(await issue(store, 100, server_version=3)) == 4, "8 at most, 4 are under way"


async def test_a_version_that_nobody_published_makes_no_room(store: Ledger) -> None:
    assert len(await issue(store, 100, server_version=50)) == 8


async def test_without_staleness_a_server_on_an_old_version_gets_no_ticket(store: Ledger) -> None:
    await store.publish(1, evaluate=False)
    assert await issue(store, 100, server_version=0, max_staleness=0) == []
    assert len(await issue(store, 100, server_version=1, max_staleness=0)) == 4


async def test_a_group_that_failed_or_expired_leaves_its_room_to_another(store: Ledger) -> None:
    ids = [task.id for task in await issue(store, 100, max_staleness=0)]
    await fail(store, ids[0])
    assert len(await issue(store, 100, max_staleness=0)) == 1


async def test_publishing_a_version_again_or_an_older_one_changes_nothing(store: Ledger) -> None:
    await leased(store, 0, 4)
    await store.publish(2, evaluate=False)
    await store.train(0)
    for version in (2, 1):
        await store.publish(version, evaluate=False)
    assert await store.version() == 2
    assert await issue(store, 100, server_version=2, max_staleness=0) == [], "the four trained groups still count"


async def test_a_ticket_past_its_deadline_is_issued_again_under_another_id(store: Ledger, redis: Redis) -> None:
    late = await issue(store, 2, deadline_s=AT_ONCE_S)
    kept = await issue(store, 3)
    assert await sweep(store) == (2, 0)
    assert await states(store) == {"in_flight": 1, "reissued": 2}
    again = await issue(store, 3, server="r1")
    assert [(task.epoch, task.position) for task in again] == [(0, 0), (0, 1), (0, 3)], "those first, then new ones"
    assert not {task.id for task in again} & {task.id for task in [*late, *kept]}
    assert await sweep(store) == (0, 0)


async def test_a_server_is_charged_for_a_ticket_past_its_deadline_as_long_as_it_holds_it(store: Ledger) -> None:
    slow, done = [task.id for task in await issue(store, 2, deadline_s=AT_ONCE_S)]
    await sweep(store)
    assert await issue(store, 2) == [], "it may be busy with both"
    assert await store.heartbeat("r0", held=[slow], grace_s=LATER_S) == 0
    assert await deliver(store, [done]) == ["void"]
    assert len(await issue(store, 2)) == 1
    assert await store.verify() == []
    await store.join("r0", "another process")
    assert len(await issue(store, 2)) == 2


async def test_a_server_that_was_silent_is_charged_for_what_it_turns_out_to_hold(store: Ledger) -> None:
    held, lost = [task.id for task in await issue(store, 2)]
    assert (await store.sweep(silent_s=0.0)).tickets == 2
    await store.join("r0", "first")
    for _ in range(2):
        assert await store.heartbeat("r0", held=[held, "999"], grace_s=LATER_S) == 0
    assert await store.heartbeat("r1", held=[lost], grace_s=LATER_S) == 0
    assert (await tickets_of(store, "r0"), await tickets_of(store, "r1")) == (1, 0), "nobody is charged for another's"
    assert len(await issue(store, 2)) == 1
    assert await store.verify() == []
    await store.heartbeat("r0", held=[], grace_s=LATER_S)
    assert len(await issue(store, 2)) == 1


async def test_a_server_that_speaks_after_a_silence_is_known_again(store: Ledger) -> None:
    await store.join("r0", "first")
    for _ in range(2):
        assert (await store.sweep(silent_s=0.0)).silent == ["r0"]
        await store.heartbeat("r0", held=[], grace_s=LATER_S)


async def test_a_server_that_its_service_has_heard_is_not_silent(store: Ledger, redis: Redis, run_name: str) -> None:
    heard = f"{run_prefix(run_name)}:heard"
    await redis.zadd(heard, {"r0": 0.0, "r1": 0.0})
    assert (await store.sweep(silent_s=LATER_S, silences_s={"r0": 1.0, "forgotten": 1.0})).silent == ["r1"]
    assert await redis.zrange(heard, 0, -1) == [b"r0"]
    assert (await store.sweep(silent_s=LATER_S, silences_s={"r0": 2 * LATER_S})).silent == [], "the latest counts"
    assert (await store.sweep(silent_s=1.0)).silent == ["r0"]


async def test_a_server_that_was_heard_before_the_clock_was_set_back_is_silent_all_the_same(
    store: Ledger, redis: Redis, run_name: str
) -> None:
    seconds, _ = await redis.time()
    await redis.zadd(f"{run_prefix(run_name)}:heard", {"r0": seconds + LATER_S})
    assert (await store.sweep(silent_s=0.0)).silent == ["r0"]


async def test_a_ticket_that_is_lost_on_its_way_comes_back_although_the_clock_was_set_back(
    store: Ledger, redis: Redis, run_name: str
) -> None:
    (lost,) = await issue(store, 1)
    await redis.hincrbyfloat(f"{run_prefix(run_name)}:about:{lost.id}", "issued_at", LATER_S)
    assert [await store.heartbeat("r0", held=[], grace_s=-1.0) for _ in range(2)] == [0, 1]


async def test_a_group_of_an_expired_ticket_is_void(store: Ledger, redis: Redis, run_name: str) -> None:
    (late,) = await issue(store, 1, deadline_s=AT_ONCE_S)
    await sweep(store)
    assert await deliver(store, [late.id]) == ["void"]
    assert await fail(store, late.id) == "void"
    assert await states(store) == {"reissued": 1}
    assert not await redis.exists(group_key(run_name, late.id))


# --- ready ---------------------------------------------------------------------------------------------------------


async def test_a_delivered_group_is_stored_with_its_tokens_counted(store: Ledger, redis: Redis, run_name: str) -> None:
    (id,) = await ready(store, 1)
    assert await states(store) == {"ready": 1}
    assert await redis.get(group_key(run_name, id)) == f"bytes of {id}".encode()
    assert (await counts(store)).tokens == 3


async def test_of_a_task_the_latest_outcome_counts(store: Ledger) -> None:
    ids = [task.id for task in await issue(store, 4)]
    for id, task, outcome in zip(ids, [7, 8, 7, 7], ["unsolved", "mixed", "mixed", "solved"], strict=True):
        facts = replace(group(id).facts, task=task, outcome=outcome)
        assert await store.deliver([replace(group(id), facts=facts)]) == ["ready"]
    assert (await store.snapshot()).tasks == {"mixed": 1, "solved": 1}


async def test_a_group_that_is_delivered_again_is_a_duplicate_whatever_became_of_it(store: Ledger) -> None:
    (id,) = await ready(store, 1)
    assert await deliver(store, [id, id]) == ["duplicate", "duplicate"]
    await lease(store, 0, 1)
    assert await deliver(store, [id]) == ["duplicate"]
    await store.train(0)
    assert await deliver(store, [id]) == ["duplicate"]
    await store.durable(1)
    assert await deliver(store, [id]) == ["duplicate"]
    assert await states(store) == {"trained": 1, "durable": 1}
    assert (await counts(store)).tokens == 3


@pytest.mark.parametrize("id", ["999", "nobody's", "", "e0-0", "1 2"])
async def test_a_group_that_nobody_asked_for_is_void(store: Ledger, id: str) -> None:
    assert await deliver(store, [id]) == ["void"]
    assert await states(store) == {}


async def test_what_is_not_stored_leaves_no_bytes_behind(store: Ledger, redis: Redis, run_name: str) -> None:
    (id,) = await ready(store, 1)
    assert await deliver(store, [id, "999"]) == ["duplicate", "void"]
    assert await arriving(redis, run_name) == []


async def test_of_two_deliveries_at_once_the_first_one_is_stored(store: Ledger, redis: Redis, run_name: str) -> None:
    (id,) = [task.id for task in await issue(store, 1)]
    first, second = group(id), replace(group(id), blob=b"other bytes")
    assert await store.deliver([first, second]) == ["ready", "duplicate"]
    assert await redis.get(group_key(run_name, id)) == first.blob


async def test_bytes_of_a_service_that_died_are_gone_with_their_ticket(
    store: Ledger, redis: Redis, run_name: str
) -> None:
    reissued, expired = await issue(store, 1, deadline_s=AT_ONCE_S), await issue(store, 2)
    for task in (*reissued, *expired):
        await redis.set(f"{run_prefix(run_name)}:arriving:{task.id}", b"bytes")
    await sweep(store)
    assert await arriving(redis, run_name) == [expired[0].id]
    await store.finish()
    assert await arriving(redis, run_name) == []


async def arriving(redis: Redis, run_name: str) -> list[str]:
    """The groups whose bytes have arrived and are not stored."""
    return [key.decode().rpartition(":")[2] async for key in redis.scan_iter(f"{run_prefix(run_name)}*:arriving:*")]


async def test_a_group_whose_bytes_redis_has_lost_is_asked_for_again(
    store: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, kept = (task.id for task in await issue(store, 2))

    async def set_all_but_one(redis: Redis, bytes_of: dict[str, bytes]) -> None:
        await set_all(redis, {name: blob for name, blob in bytes_of.items() if not name.endswith(f":{lost}")})

    with monkeypatch.context() as patched:
        patched.setattr("slipstream.buffer.store.ledger.set_all", set_all_but_one)
        assert await deliver(store, [lost, kept]) == ["again", "ready"]
    assert await states(store) == {"in_flight": 1, "ready": 1}
    assert await deliver(store, [lost, kept]) == ["ready", "duplicate"]


async def test_a_failed_group_is_filtered_with_its_reason(store: Ledger) -> None:
    ids = [task.id for task in await issue(store, 3)]
    assert await fail(store, ids[0], reason="too_long", tokens=70) == "filtered"
    assert await fail(store, ids[1], reason="reward_raised", tokens=0) == "filtered"
    assert await fail(store, ids[1], reason="reward_raised", tokens=0) == "duplicate"
    assert await deliver(store, [ids[0]]) == ["duplicate"]
    assert await states(store) == {"in_flight": 1, "filtered": 2}
    assert (await counts(store)).reasons == {"filtered:too_long": 1, "filtered:reward_raised": 1}


# --- leased --------------------------------------------------------------------------------------------------------


async def test_a_lease_is_all_or_nothing(store: Ledger) -> None:
    await ready(store, 3)
    assert await lease(store, 0, 4) == []
    assert await states(store) == {"ready": 3}
    assert len(await lease(store, 0, 3)) == 3
    assert await states(store) == {"leased": 3}


async def test_groups_are_leased_in_the_order_of_their_tickets(store: Ledger) -> None:
    ids = [task.id for task in await issue(store, 12, max_staleness=9)]
    for id in reversed(ids):
        await deliver(store, [id])
    assert await lease(store, 0, 5) + await lease(store, 1, 7) == ids, "ticket 10 comes after ticket 9"


async def test_a_group_older_than_max_staleness_is_never_leased(store: Ledger, redis: Redis, run_name: str) -> None:
    stale = await ready(store, 2, oldest_version=2)
    fresh = await ready(store, 2, oldest_version=3)
    assert await lease(store, 0, 2, consuming_version=5, max_staleness=2) == fresh
    assert await states(store) == {"leased": 2, "expired": 2}
    assert (await counts(store)).reasons == {"expired:too_stale": 2}
    assert not await redis.exists(*(group_key(run_name, id) for id in stale)), "its bytes are given back"


async def test_too_stale_groups_expire_even_if_too_few_others_are_ready(store: Ledger) -> None:
    await ready(store, 2, oldest_version=0)
    (fresh,) = await ready(store, 1, oldest_version=2)
    assert await lease(store, 0, 2, consuming_version=2) == []
    assert await states(store) == {"ready": 1, "expired": 2}
    assert await lease(store, 0, 1, consuming_version=2) == [fresh]


async def test_the_same_step_gets_the_same_lease_when_asked_again(store: Ledger) -> None:
    await ready(store, 4)
    first = await lease(store, 0, 2)
    assert await lease(store, 0, 2) == first
    assert await states(store) == {"ready": 2, "leased": 2}
    assert not set(await lease(store, 1, 2)) & set(first)


async def test_a_lease_past_its_deadline_returns_to_ready(store: Ledger) -> None:
    await leased(store, 0, 2, deadline_s=AT_ONCE_S)
    await leased(store, 1, 1, deadline_s=LATER_S)
    assert await sweep(store) == (0, 2)
    assert await states(store) == {"ready": 2, "leased": 1}


async def test_a_lease_that_ran_out_is_its_steps_again_as_soon_as_the_learner_asks_for_anything(
    store: Ledger,
) -> None:
    """A training step may take longer than the lease: its groups must not be trained on twice."""
    late = await leased(store, 0, 3, deadline_s=AT_ONCE_S)
    more = await ready(store, 2)
    await sweep(store)
    assert await lease(store, 1, 2) == more, "not those that step 0 still trains on"
    assert await lease(store, 0, 3) == late
    assert await store.train(0) == 3
    assert await states(store) == {"leased": 2, "trained": 3}


async def test_a_lease_that_ran_out_goes_to_another_learner(store: Ledger) -> None:
    late = await leased(store, 5, 2, deadline_s=AT_ONCE_S)
    await sweep(store)
    await store.restart(0, learner="learner 1")
    assert await lease(store, 0, 2) == late


# --- the end -------------------------------------------------------------------------------------------------------


async def test_the_end_of_a_run_expires_what_is_in_flight_and_issues_nothing_more(store: Ledger) -> None:
    await leased(store, 0, 2)
    (late,) = await issue(store, 1)
    assert await store.finish() == 1
    assert await states(store) == {"ready": 2, "expired": 1}
    assert (await counts(store)).reasons == {"expired:run_finished": 1}
    assert await issue(store, 100) == []
    assert await deliver(store, [late.id]) == ["finished"]
    assert await fail(store, late.id) == "finished"
    assert await store.finish() == 0


async def test_a_finished_run_goes_on_when_its_learner_comes_back(store: Ledger) -> None:
    await store.finish()
    await store.restart(0, learner="learner 6")
    assert len(await issue(store, 2)) == 2


async def test_runs_on_one_server_do_not_see_each_other(store: Ledger, redis: Redis, run_name: str) -> None:
    await ready(store, 2)
    other = Ledger(redis, f"{run_name}.other", RULES)
    assert await counts(other) == LedgerCounts()
    assert await lease(other, 0, 1) == []
    assert [task.position for task in await issue(other, 1)] == [0]
