"""What the ledger does with groups that were trained on: checkpoints, retention, and learners that start again."""

import pytest
from redis.asyncio import Redis

from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.scripts import run_prefix
from slipstream.buffer.store.types import SupersededError, UnknownLearnerError
from tests.buffer.ledger import (
    AT_ONCE_S,
    LATER_S,
    counts,
    deliver,
    fail,
    issue,
    lease,
    leased,
    ready,
    ruled,
    states,
    sweep,
    trim,
)


async def test_training_moves_the_groups_of_its_step_and_no_others(store: Ledger) -> None:
    await leased(store, 0, 2)
    await leased(store, 1, 1)
    assert await store.train(0) == 2
    assert await states(store) == {"leased": 1, "trained": 2}
    assert await store.train(0) == 0, "told twice, counted once"
    assert await store.train(1) == 1
    assert await store.train(0) == 0
    await ready(store, 2)
    assert await lease(store, 1, 2) == [], "it is over, whatever was said once more of the step before"


async def test_what_was_trained_on_although_its_lease_had_run_out_is_not_leased_again(store: Ledger) -> None:
    await leased(store, 0, 2, deadline_s=AT_ONCE_S)
    await sweep(store)
    assert await store.train(0) == 2
    assert await states(store) == {"trained": 2}
    assert await lease(store, 1, 2) == []


async def test_a_step_whose_end_redis_has_forgotten_ends_with_the_next_one(store: Ledger) -> None:
    """Its groups would be leased, and take up room, for ever."""
    await leased(store, 0, 2)
    await leased(store, 1, 3)
    await leased(store, 2, 1)
    assert await store.train(1) == 5
    assert await states(store) == {"leased": 1, "trained": 5}
    assert (await store.step_tally()).groups == {0: 2, 1: 3}, "each its own"
    assert await store.verify() == []


async def test_a_step_whose_lease_redis_has_forgotten_ends_those_before_it_all_the_same(store: Ledger) -> None:
    await leased(store, 0, 2)
    assert await store.train(1) == 2
    assert (await store.step_tally()).groups == {0: 2}


async def test_a_checkpoint_makes_the_steps_that_it_contains_durable(store: Ledger) -> None:
    await leased(store, 0, 2)
    await leased(store, 1, 1)
    await store.train(0)
    await store.train(1)
    assert await store.durable(1) == 2
    assert await states(store) == {"trained": 3, "durable": 2}
    assert await store.durable(1) == 0, "told twice, counted once"


async def test_groups_that_are_over_are_forgotten_all_but_the_latest(
    store: Ledger, redis: Redis, run_name: str
) -> None:
    ids = [task.id for task in await issue(store, 6)]
    await deliver(store, ids[:4])
    await fail(store, ids[4])
    await fail(store, ids[5])
    await lease(store, 0, 4)
    await store.train(0)
    await store.durable(1)
    assert await trim(store, keep=1, max_age_s=None, until_exported=False) == 4
    assert await states(store) == {"trained": 4, "durable": 4, "filtered": 2}, "the counters go on"
    assert await store.verify() == []
    left = {key.decode().rpartition(":")[2] async for key in redis.scan_iter(match=f"{run_prefix(run_name)}*")}
    assert left & {*ids} == {ids[3], ids[5]}, "no key of the others is left"
    assert await deliver(store, [ids[0]]) == ["void"]


async def test_what_came_to_nothing_is_forgotten_but_for_the_latest_of_each_kind(
    store: Ledger, redis: Redis, run_name: str
) -> None:
    lost = [task.id for task in await issue(store, 2, deadline_s=AT_ONCE_S)]
    assert await sweep(store) == (2, 0)
    await store.heartbeat("r0", held=[], grace_s=LATER_S)
    stale = await ready(store, 2)
    assert await lease(store, 0, 2, consuming_version=2) == []
    assert await states(store) == {"reissued": 2, "expired": 2}
    assert await trim(store, keep=1, max_age_s=None, until_exported=False) == 2
    left = {key.decode().rpartition(":")[2] async for key in redis.scan_iter(match=f"{run_prefix(run_name)}*")}
    assert left & {*lost, *stale} == {lost[1], stale[1]}
    assert await store.verify() == []


async def test_old_groups_are_forgotten_whatever_their_number(store: Ledger) -> None:
    await leased(store, 0, 2)
    await store.train(0)
    await store.durable(1)
    assert await trim(store, keep=100, max_age_s=LATER_S, until_exported=False) == 0
    assert await trim(store, keep=100, max_age_s=1e-9, until_exported=False) == 2


async def test_a_look_forgets_more_groups_than_one_script_may(store: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.buffer.store.ledger.FORGET_AT_ONCE", 1)
    await leased(store, 0, 3)
    await store.train(0)
    await store.durable(1)
    assert await trim(store, keep=0, max_age_s=None, until_exported=False) == 3


async def test_durable_groups_wait_for_their_export_if_they_are_told_to(store: Ledger) -> None:
    await leased(store, 0, 2)
    await store.train(0)
    await store.durable(1)
    assert await trim(store, keep=0, max_age_s=None, until_exported=True) == 0
    assert await trim(store, keep=0, max_age_s=None, until_exported=False) == 2


async def test_what_was_exported_and_then_undone_waits_for_its_export_again(store: Ledger) -> None:
    ids = await leased(store, 0, 2)
    await store.train(0)
    await store.durable(1)
    assert await store.exported(ids, forget=False) == 2
    await store.restart(0, learner="learner 2")
    assert await lease(store, 0, 2) == ids
    await store.train(0)
    await store.durable(1)
    assert await trim(store, keep=0, max_age_s=None, until_exported=True) == 0
    await store.exported(ids, forget=False)
    assert await trim(store, keep=0, max_age_s=None, until_exported=True) == 2


async def test_a_learner_that_starts_from_an_older_checkpoint_gets_back_what_was_durable(store: Ledger) -> None:
    for step in range(3):
        await leased(store, step, 2)
        await store.train(step)
    await store.durable(3)
    assert await store.restart(1, learner="learner 2") == (4, 0)
    assert await states(store) == {"ready": 4, "trained": 2, "durable": 2}
    assert await store.verify() == []


async def test_a_learner_is_told_of_undone_steps_whose_groups_were_forgotten(store: Ledger) -> None:
    for step in range(3):
        await leased(store, step, 2)
        await store.train(step)
    await store.durable(3)
    for keep, forgotten_step in ((4, 0), (2, 1)):
        await trim(store, keep=keep, max_age_s=None, until_exported=False)
        assert (await store.step_tally()).forgotten_step == forgotten_step
    assert await store.restart(1, learner="learner 3") == (2, 1), "step 2 comes back, step 1 can't"
    await ready(store, 2)
    for step in (1, 2):
        assert len(await lease(store, step, 2)) == 2
        await store.train(step)
    assert await store.restart(2, learner="learner 4") == (2, 0), "the step was trained anew, on groups that are known"
    assert (await store.step_tally()).forgotten_step == 0


async def test_whatever_the_order_in_which_groups_are_forgotten_the_last_step_counts(store: Ledger) -> None:
    ids = []
    for step in range(3):
        ids.append(await leased(store, step, 2))
        await store.train(step)
    await store.durable(3)
    assert [await store.exported(ids[step], forget=True) for step in (1, 0)] == [2, 2]
    assert await store.restart(0, learner="learner 3") == (2, 2), "step 2 comes back, steps 0 and 1 can't"


async def test_a_learner_that_starts_again_gets_back_what_its_checkpoint_lacks(store: Ledger) -> None:
    for step in range(3):
        await leased(store, step, 2)
    held = await leased(store, 3, 3)
    for step in range(3):
        await store.train(step)
    await store.durable(1)
    assert await store.restart(1, learner="learner 4") == (7, 0)
    assert await states(store) == {"ready": 7, "trained": 2, "durable": 2}
    back = [await lease(store, step, count) for step, count in ((1, 2), (2, 2), (3, 3))]
    assert back[2] == held
    assert await store.train(1) == 2


async def test_groups_of_undone_steps_count_once_against_the_staleness_capacity(store: Ledger) -> None:
    """Twice, and there would be no room for the groups that the run still lacks."""
    for step in range(3):
        await leased(store, step, 2)
        await store.train(step)
    await store.publish(1, evaluate=False)
    for step in range(3, 6):
        await leased(store, step, 2)
        await store.train(step)
    await store.restart(4, learner="learner 1")
    # Two versions of four groups: two were trained for version 1, four came back.
    assert len(await issue(store, 100, server_version=1)) == 2 * 4 - 2 - 4
    await store.restart(2, learner="learner 2")
    # Two are in flight by now and eight are ready, two of which were trained before version 1.
    assert await issue(store, 100, server_version=1) == []
    assert len(await issue(store, 100, server_version=1, max_staleness=2)) == 3 * 4 - 2 - 8


async def test_after_a_restart_no_two_steps_hold_the_same_group(store: Ledger) -> None:
    await ready(store, 1, oldest_version=0)
    (kept,) = await ready(store, 1, oldest_version=1)
    assert await lease(store, 0, 1)
    assert await lease(store, 1, 1) == [kept]
    await store.restart(0, learner="learner 5")
    assert await lease(store, 0, 1, consuming_version=1, max_staleness=0) == [kept], "the other one is too stale now"
    assert await lease(store, 1, 1, consuming_version=1, max_staleness=0) == []


async def test_a_learners_hello_that_comes_again_late_takes_nothing_back(store: Ledger) -> None:
    await store.restart(0, learner="first")
    await leased(store, 0, 2)
    assert await store.train(0) == 2
    held = await leased(store, 1, 2)
    assert await store.restart(0, learner="first") == (0, 0)
    assert await states(store) == {"leased": 2, "trained": 2}
    assert await lease(store, 1, 2) == held


async def test_a_request_for_a_step_that_is_over_holds_no_groups(store: Ledger) -> None:
    await leased(store, 0, 2)
    await store.train(0)
    await ready(store, 2)
    assert await lease(store, 0, 2) == []
    await store.restart(0, learner="another")
    assert len(await lease(store, 0, 2)) == 2, "unless it was undone"


async def test_what_is_leased_for_a_step_that_the_checkpoint_contains_was_trained(store: Ledger) -> None:
    """Redis has lost what its learner said before it saved the checkpoint."""
    await leased(store, 0, 2)
    held = await leased(store, 1, 2)
    assert await store.restart(1, learner="another") == (2, 0), "the groups of step 1 alone"
    assert await states(store) == {"ready": 2, "trained": 2}
    assert (await store.step_tally()).groups == {0: 2}
    assert await lease(store, 1, 2) == held
    assert await store.train(1) == 2
    assert await store.durable(2) == 4
    assert (await store.step_tally()).groups == {0: 2, 1: 2}
    assert await store.verify() == []


async def test_of_such_a_steps_groups_those_with_uses_left_are_ready_again(store: Ledger) -> None:
    ids = await leased(store, 0, 2)
    assert await ruled(store, max_uses=2).restart(1, learner="another") == (0, 0)
    assert await states(store) == {"ready": 2}
    assert (await counts(store)).uses == 2
    assert await lease(store, 1, 2) == ids
    assert await store.verify() == []
    assert await ruled(store, max_uses=2).train(1) == 2
    assert (await store.step_tally()).groups == {0: 2, 1: 2}


async def test_the_hello_of_a_learner_that_was_replaced_comes_too_late(store: Ledger) -> None:
    for learner in ("first", "second"):
        await store.restart(0, learner=learner)
    await leased(store, 0, 2)
    with pytest.raises(SupersededError, match="another learner has taken over run"):
        await store.restart(0, learner="first")
    with pytest.raises(UnknownLearnerError, match="has not heard of this learner"):
        await store.train(0, learner="third")
    assert await states(store) == {"leased": 2}
    assert await store.train(0, learner="second") == 2
