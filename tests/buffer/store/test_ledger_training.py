"""Groups after training: checkpoints, retention and restarted learners.

`test_ledger_interleavings` covers their combinations; here are the details that its model leaves out.
"""

import pytest
from redis.asyncio import Redis

from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import run_prefix
from slipstream.buffer.store.types import SupersededError, UnknownLearnerError
from tests.buffer.ledger import (
    AT_ONCE_S,
    LATER_S,
    deliver,
    fail,
    heartbeat,
    issue,
    lease,
    leased,
    ready,
    states,
    sweep,
    trim,
)


async def durable(store: Ledger, groups: int) -> list[str]:
    """Trains that many groups in step 0 and saves a checkpoint."""
    ids = await leased(store, 0, groups)
    await store.train(0)
    await store.durable(1)
    return ids


async def test_repeated_trained_request_changes_nothing(store: Ledger) -> None:
    await leased(store, 0, 2)
    await leased(store, 1, 1)
    assert [await store.train(step) for step in (0, 0, 1, 0)] == [2, 0, 1, 0]
    await ready(store, 2)
    assert [await lease(store, step, 2) for step in (0, 1)] == [[], []], "both steps are finished"
    await store.restart(0, learner="another")
    assert len(await lease(store, 0, 2)) == 2, "the restart has undone them"


@pytest.mark.parametrize("groups", [[2, 3], [2]], ids=["both leased", "one lease lost"])
async def test_trained_ends_earlier_steps(store: Ledger, groups: list[int]) -> None:
    """Redis has lost the `trained` request of step 0: its groups would stay leased forever."""
    for step, count in enumerate(groups):
        await leased(store, step, count)
    await leased(store, 2, 1)
    assert await store.train(1) == sum(groups)
    assert await states(store) == {"leased": 1, "trained": sum(groups)}
    assert (await store.step_tally()).groups == dict(enumerate(groups))
    assert await store.verify() == []


async def ids_in_keys(redis: Redis, run_name: str) -> set[str]:
    """Ids of the groups that have keys of their own."""
    keys = [key.decode() async for key in redis.scan_iter(match=f"{run_prefix(run_name)}*")]
    return {key.rpartition(":")[2] for key in keys if ":account:" not in key}  # these end with the number of a row


async def test_trim_keeps_latest_finished_groups(store: Ledger, redis: Redis, run_name: str) -> None:
    ids = [task.id for task in await issue(store, 6)]
    await deliver(store, ids[:4])
    await fail(store, ids[4])
    await fail(store, ids[5])
    await lease(store, 0, 4)
    await store.train(0)
    await store.durable(1)
    assert await trim(store, keep=1, max_age_s=None, until_exported=False) == 4
    assert await states(store) == {"trained": 4, "durable": 4, "filtered": 2}
    assert await store.verify() == []
    left = await ids_in_keys(redis, run_name)
    assert left & {*ids} == {ids[3], ids[5]}, "the others leave no key"
    assert await deliver(store, [ids[0]]) == ["void"]


async def test_trim_keeps_latest_reissued_and_expired(store: Ledger, redis: Redis, run_name: str) -> None:
    lost = [task.id for task in await issue(store, 2, deadline_s=AT_ONCE_S)]
    assert await sweep(store) == (2, 0)
    await heartbeat(store, "r0", [])
    stale = await ready(store, 2)
    assert await lease(store, 0, 2, consuming_version=2) == []
    assert await states(store) == {"reissued": 2, "expired": 2}
    assert await trim(store, keep=1, max_age_s=None, until_exported=False) == 2
    left = await ids_in_keys(redis, run_name)
    assert left & {*lost, *stale} == {lost[1], stale[1]}
    assert await store.verify() == []


async def test_trim_by_age(store: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.buffer.store.ledger.FORGET_AT_ONCE", 1)  # several batches
    await durable(store, 3)
    assert await trim(store, keep=100, max_age_s=LATER_S, until_exported=False) == 0
    assert await trim(store, keep=100, max_age_s=1e-9, until_exported=False) == 3


async def test_trim_waits_for_export(store: Ledger) -> None:
    ids = await durable(store, 2)
    assert await trim(store, keep=0, max_age_s=None, until_exported=True) == 0
    assert await store.exported(ids, forget=False) == 2
    await store.restart(0, learner="learner 2")
    assert await lease(store, 0, 2) == ids
    await store.train(0)
    await store.durable(1)
    assert await trim(store, keep=0, max_age_s=None, until_exported=True) == 0, "the restart has undone the export"
    await store.exported(ids, forget=False)
    assert await trim(store, keep=0, max_age_s=None, until_exported=True) == 2


async def test_restart_reports_forgotten_steps(store: Ledger) -> None:
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
    assert await store.restart(2, learner="learner 4") == (2, 0), "the step was trained again, on known groups"
    assert (await store.step_tally()).forgotten_step == 0


async def test_latest_forgotten_step_counts(store: Ledger) -> None:
    ids = []
    for step in range(3):
        ids.append(await leased(store, step, 2))
        await store.train(step)
    await store.durable(3)
    assert [await store.exported(ids[step], forget=True) for step in (1, 0)] == [2, 2]
    assert await store.restart(0, learner="learner 3") == (2, 2), "step 2 comes back, steps 0 and 1 can't"


async def test_repeated_hello_takes_nothing_back(store: Ledger) -> None:
    await store.restart(0, learner="first")
    await leased(store, 0, 2)
    assert await store.train(0) == 2
    held = await leased(store, 1, 2)
    assert await store.restart(0, learner="first") == (0, 0)
    assert await states(store) == {"leased": 2, "trained": 2}
    assert await lease(store, 1, 2) == held


async def test_restart_trains_leases_before_checkpoint(store: Ledger) -> None:
    """Redis has lost the learner's `trained` request, which preceded its checkpoint."""
    await leased(store, 0, 2)
    held = await leased(store, 1, 2)
    assert await store.restart(1, learner="another") == (2, 0), "only the groups of step 1"
    assert await states(store) == {"ready": 2, "trained": 2}
    assert (await store.step_tally()).groups == {0: 2}
    assert await lease(store, 1, 2) == held
    assert await store.train(1) == 2
    assert await store.durable(2) == 4
    assert (await store.step_tally()).groups == {0: 2, 1: 2}
    assert await store.verify() == []


async def test_superseded_learner_can_not_restart_run(store: Ledger) -> None:
    for learner in ("first", "second"):
        await store.restart(0, learner=learner)
    await leased(store, 0, 2)
    with pytest.raises(SupersededError, match="taken over"):
        await store.restart(0, learner="first")
    with pytest.raises(UnknownLearnerError, match="learner"):
        await store.train(0, learner="third")
    assert await states(store) == {"leased": 2}
    assert await store.train(0, learner="second") == 2
