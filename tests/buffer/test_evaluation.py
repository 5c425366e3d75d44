"""Evaluations in the ledger: slices of the held-out tasks, handed out, answered, reported."""

from redis.asyncio import Redis

from slipstream.buffer.keys import group_key
from slipstream.buffer.records import EvalSlice
from slipstream.buffer.store import EVAL_RETRIES, EVAL_SLICE, RedisStore
from tests.buffer.ledger import (
    AT_ONCE_S,
    LATER_S,
    states,
)


async def hand_out(
    store: RedisStore, slices: int, *, server: str = "r0", deadline_s: float = LATER_S
) -> tuple[int, list[EvalSlice]]:
    return await store.evaluate(3, server=server, slices=slices, deadline_s=deadline_s)


async def answer(store: RedisStore, work: EvalSlice, *, score_sum: float = 0.0, version: int = 3) -> str:
    return await store.evaluated(work, version=version, score_sum=score_sum, blob=b"answers")


async def test_each_held_out_task_is_handed_out_once(store: RedisStore) -> None:
    await store.publish(3, eval_tasks=2 * EVAL_SLICE + 5)
    assert await store.evaluating() == 3
    left, first = await hand_out(store, 2)
    assert left == 1
    assert await hand_out(store, 2) == (0, [EvalSlice("e3-128", 128, 5)])
    assert first == [EvalSlice("e3-0", 0, 64), EvalSlice("e3-64", 64, 64)]
    assert await hand_out(store, 2) == (0, [])


async def test_only_the_version_under_evaluation_is_handed_out(store: RedisStore) -> None:
    await store.publish(3, eval_tasks=10)
    assert await store.evaluate(2, server="r0", slices=1, deadline_s=LATER_S) == (0, [])


async def test_a_slice_past_its_deadline_is_handed_out_again(store: RedisStore) -> None:
    await store.publish(3, eval_tasks=2 * EVAL_SLICE)
    _, (lost,) = await hand_out(store, 1, deadline_s=AT_ONCE_S)
    assert (await store.sweep(silent_s=None)).slices == 1
    _, (other, again) = await hand_out(store, 2)
    assert (other.first, again) == (EVAL_SLICE, EvalSlice("e3-0-2", 0, EVAL_SLICE)), "a new ticket"
    assert await hand_out(store, 2) == (0, [])
    assert await answer(store, lost) == "evaluated", "from whichever server it comes first"
    assert await answer(store, lost) == "duplicate"
    assert await answer(store, again) == "void"
    assert (await store.sweep(silent_s=None)).slices == 0


async def test_a_slice_that_failed_is_handed_out_again(store: RedisStore) -> None:
    await store.publish(3, eval_tasks=2 * EVAL_SLICE)
    _, (bad,) = await hand_out(store, 1)
    assert await store.evaluation_failed(bad.id, patience=1) == "again"
    assert await store.evaluation_failed(bad.id, patience=1) == "filtered"
    assert await store.evaluation_failed(bad.id) == "void"
    assert EvalSlice("e3-0-2", 0, EVAL_SLICE) in (await hand_out(store, 2))[1]


async def test_a_slice_that_always_fails_waits_for_its_deadline_at_last(store: RedisStore) -> None:
    await store.publish(3, eval_tasks=EVAL_SLICE)
    for _ in range(EVAL_RETRIES):
        _, (bad,) = await hand_out(store, 1)
        assert await store.evaluation_failed(bad.id) == "filtered"
    _, (bad,) = await hand_out(store, 1, deadline_s=AT_ONCE_S)
    assert await store.evaluation_failed(bad.id) == "filtered"
    assert await hand_out(store, 1) == (0, [])
    assert (await store.sweep(silent_s=None)).slices == 1


async def test_what_a_silent_server_holds_of_an_evaluation_is_handed_out_again(store: RedisStore) -> None:
    await store.publish(3, eval_tasks=2 * EVAL_SLICE)
    await store.join("gone", "1")
    _, (lost,) = await hand_out(store, 1, server="gone")
    _, (kept,) = await hand_out(store, 1, server="r0")
    swept = await store.sweep(silent_s=0.0)
    assert (swept.silent, swept.slices) == (["gone"], 1)
    assert await hand_out(store, 2) == (0, [EvalSlice(f"{lost.id}-2", lost.first, lost.tasks)])
    assert await answer(store, kept) == "evaluated"


async def test_an_evaluation_reports_once_when_its_last_slice_arrives(store: RedisStore) -> None:
    await store.publish(3, eval_tasks=EVAL_SLICE + 16)
    _, (first, second) = await hand_out(store, 2)
    assert await answer(store, first, score_sum=40.0) == "evaluated"
    assert (await store.standing()).evaluated == []
    assert await answer(store, second, score_sum=8.0) == "evaluated"
    (report,) = await store.eval_reports((await store.standing()).evaluated)
    assert (report.version, report.tasks, report.score) == (3, 80, 0.6)
    assert report.group_ids == ["e3-0", "e3-64"]
    assert 0 <= report.eval_s < 60


async def test_a_slice_that_is_answered_twice_counts_once(store: RedisStore) -> None:
    await store.publish(3, eval_tasks=EVAL_SLICE + 1)
    _, (first, second) = await hand_out(store, 2)
    assert await answer(store, first, score_sum=64.0) == "evaluated"
    assert await answer(store, first, score_sum=64.0) == "duplicate"
    assert (await store.standing()).evaluated == []
    await answer(store, second, score_sum=1.0)
    (report,) = await store.eval_reports((await store.standing()).evaluated)
    assert (report.tasks, report.score) == (65, 1.0)


async def test_an_answer_that_nobody_asked_for_is_void(store: RedisStore) -> None:
    await store.publish(3, eval_tasks=10)
    assert await answer(store, EvalSlice("e3-0", 0, 10)) == "void", "not handed out"
    _, (work,) = await hand_out(store, 1)
    assert await answer(store, work, version=4) == "void"
    assert await answer(store, EvalSlice(work.id, 0, 9)) == "void"
    assert await answer(store, work) == "evaluated"


async def test_the_answers_are_kept_until_the_next_evaluation(store: RedisStore, redis: Redis, run_name: str) -> None:
    await store.publish(3, eval_tasks=10)
    _, (work,) = await hand_out(store, 1)
    await answer(store, work)
    await store.publish(4, eval_tasks=0)
    assert await redis.get(group_key(run_name, work.id)) == b"answers"
    await store.publish(5, eval_tasks=10)
    assert not await redis.exists(group_key(run_name, work.id))


async def test_asking_twice_for_an_evaluation_starts_it_once(store: RedisStore) -> None:
    await store.publish(3, eval_tasks=10)
    await hand_out(store, 1)
    await store.publish(3, eval_tasks=10)
    assert await hand_out(store, 1) == (0, [])


async def test_evaluation_takes_nothing_from_the_ledger(store: RedisStore) -> None:
    await store.publish(3, eval_tasks=10)
    _, (work,) = await hand_out(store, 1)
    await answer(store, work)
    assert await states(store) == {}
