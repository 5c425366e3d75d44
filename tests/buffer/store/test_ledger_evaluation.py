"""Evaluations in the ledger: slices of the held-out tasks, handed out, answered, reported."""

import math

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from slipstream.buffer.store.ledger import EVAL_RETRIES, EVAL_SLICE, Ledger
from slipstream.buffer.store.scripts import group_key, run_prefix
from slipstream.buffer.store.types import EvalSlice
from tests.buffer.ledger import AT_ONCE_S, LATER_S, issue, ruled, states


async def hand_out(
    store: Ledger, tasks: int, *, server: str = "r0", version: int = 3, deadline_s: float = LATER_S
) -> tuple[int, list[EvalSlice]]:
    """A server's part of so many held-out tasks."""
    return await ruled(store, ticket_deadline_s=deadline_s).evaluate(version, server=server, eval_tasks=tasks)


async def join(store: Ledger, *servers: str) -> None:
    for server in servers:
        await store.join(server, "1")


async def answer(store: Ledger, work: EvalSlice, *, score_sum: float = 0.0, version: int = 3, missing: int = 0) -> str:
    answered = work.tasks - missing
    return await store.evaluated(work, version=version, answered=answered, score_sum=score_sum, blob=b"answers")


async def test_each_held_out_task_is_handed_out_once(store: Ledger) -> None:
    await store.publish(3, evaluate=True)
    assert (await store.snapshot()).evaluating == 3
    await join(store, "r0", "r1")
    tasks = 2 * EVAL_SLICE + 5
    left, first = await hand_out(store, tasks, server="r0")
    assert first == [EvalSlice("e3-0", 0, 64), EvalSlice("e3-64", 64, 64)]
    assert left == (await store.snapshot()).slices_left == 1
    assert await hand_out(store, tasks, server="r1") == (0, [EvalSlice("e3-128", 128, 5)])
    assert await hand_out(store, tasks, server="r1") == (0, [])


async def test_a_server_holds_its_part_at_most_and_gets_another_slice_for_each_that_it_has_answered(
    store: Ledger,
) -> None:
    await store.publish(3, evaluate=True)
    await join(store, "r0", "r1", "r2", "r3")
    tasks = 8 * EVAL_SLICE
    left, (first, _) = await hand_out(store, tasks)
    assert left == 6
    assert await hand_out(store, tasks) == (6, []), "however often it asks"
    await answer(store, first)
    left, more = await hand_out(store, tasks)
    assert (left, len(more)) == (5, 1), "the others may never come"


async def test_only_the_version_under_evaluation_is_handed_out(store: Ledger) -> None:
    await store.publish(3, evaluate=True)
    assert await hand_out(store, 10, version=2) == (0, [])
    assert await hand_out(store, 10, version=4) == (0, [])
    await store.publish(2, evaluate=True)
    assert (await store.snapshot()).evaluating == 3, "what arrives again, late, asks for nothing"


async def test_an_evaluation_without_held_out_tasks_is_over_when_a_server_asks(store: Ledger) -> None:
    await store.publish(3, evaluate=True)
    for _ in range(2):
        assert await hand_out(store, 0) == (0, [])
    assert (await store.snapshot()).evaluated == [3]
    (report,) = await store.eval_reports([3])
    assert (report.tasks, report.failed, report.score, report.group_ids) == (0, 0, 0.0, [])


async def test_a_slice_past_its_deadline_is_handed_out_again(store: Ledger) -> None:
    await store.publish(3, evaluate=True)
    await join(store, "r0", "r1")
    _, (lost,) = await hand_out(store, 2 * EVAL_SLICE, deadline_s=AT_ONCE_S)
    assert (await store.sweep(silent_s=None)).slices == 1
    _, (other,) = await hand_out(store, 2 * EVAL_SLICE, server="r0")
    _, (again,) = await hand_out(store, 2 * EVAL_SLICE, server="r1")
    assert (other.first, again) == (EVAL_SLICE, EvalSlice("e3-0-2", 0, EVAL_SLICE)), "a new ticket"
    assert await hand_out(store, 2 * EVAL_SLICE) == (0, [])
    assert await answer(store, lost) == "evaluated", "from whichever server it comes first"
    assert await answer(store, lost) == "duplicate"
    assert await answer(store, again) == "void"
    assert (await store.sweep(silent_s=None)).slices == 0


async def test_a_slice_that_failed_is_handed_out_again(store: Ledger) -> None:
    await store.publish(3, evaluate=True)
    _, (bad, _) = await hand_out(store, 2 * EVAL_SLICE)
    assert await store.evaluation_failed(bad.id, patience=1) == "again"
    assert await store.evaluation_failed(bad.id, patience=1) == "filtered"
    assert await store.evaluation_failed(bad.id) == "void"
    assert await hand_out(store, 2 * EVAL_SLICE) == (0, [EvalSlice("e3-0-2", 0, EVAL_SLICE)])


async def test_a_slice_that_always_fails_is_given_up_and_the_evaluation_ends_without_it(store: Ledger) -> None:
    await store.publish(3, evaluate=True)
    tasks = EVAL_SLICE + 5
    _, (bad, good) = await hand_out(store, tasks)
    await answer(store, good, score_sum=4.0)
    for _ in range(EVAL_RETRIES):
        assert await store.evaluation_failed(bad.id) == "filtered"
        _, (bad,) = await hand_out(store, tasks)
    assert (await store.snapshot()).evaluated == []
    assert await store.evaluation_failed(bad.id) == "filtered"
    assert await hand_out(store, tasks) == (0, [])
    assert await answer(store, bad) == "void"
    (report,) = await store.eval_reports((await store.snapshot()).evaluated)
    assert (report.tasks, report.failed, report.score) == (5, EVAL_SLICE, 0.8)


async def test_held_out_tasks_without_an_answer_are_counted_and_do_not_lower_the_score(store: Ledger) -> None:
    await store.publish(3, evaluate=True)
    _, (work,) = await hand_out(store, 10)
    await answer(store, work, score_sum=4.0, missing=2)
    (report,) = await store.eval_reports((await store.snapshot()).evaluated)
    assert (report.tasks, report.failed, report.score) == (8, 2, 0.5)


async def test_what_a_silent_server_holds_of_an_evaluation_is_handed_out_again(
    store: Ledger, redis: Redis, run_name: str
) -> None:
    await store.publish(3, evaluate=True)
    await join(store, "gone", "r0")
    _, (lost,) = await hand_out(store, 2 * EVAL_SLICE, server="gone")
    _, (kept,) = await hand_out(store, 2 * EVAL_SLICE, server="r0")
    await redis.zadd(f"{run_prefix(run_name)}:heard", {"gone": 0.0})
    swept = await store.sweep(silent_s=LATER_S)
    assert (swept.silent, swept.slices) == (["gone"], 1)
    assert await hand_out(store, 2 * EVAL_SLICE) == (0, [EvalSlice(f"{lost.id}-2", lost.first, lost.tasks)])
    assert await answer(store, kept) == "evaluated"


async def test_what_a_server_that_leaves_held_comes_back_at_once(store: Ledger) -> None:
    await store.publish(3, evaluate=True)
    assert await store.join("r0", "first") == 0
    assert len(await issue(store, 2, server_version=3)) == 2
    _, (left,) = await hand_out(store, 10)
    assert await store.leave("r0", "first") == 3
    assert await store.incarnation("r0") == "", "else those of all servers that ever were would be kept"
    await join(store, "r1")
    assert await hand_out(store, 10, server="r1") == (0, [EvalSlice(f"{left.id}-2", 0, 10)])


async def test_an_evaluation_reports_once_when_its_last_slice_arrives(store: Ledger) -> None:
    await store.publish(3, evaluate=True)
    _, (first, second) = await hand_out(store, EVAL_SLICE + 16)
    assert await answer(store, first, score_sum=40.0) == "evaluated"
    assert (await store.snapshot()).evaluated == []
    assert await answer(store, second, score_sum=8.0) == "evaluated"
    (report,) = await store.eval_reports((await store.snapshot()).evaluated)
    assert (report.version, report.tasks, report.score) == (3, 80, 0.6)
    assert report.group_ids == ["e3-0", "e3-64"]
    assert 0 <= report.eval_s < 60


async def test_an_evaluation_that_redis_has_lost_is_reported_anew(store: Ledger, redis: Redis, run_name: str) -> None:
    scores = []
    for score_sum in (0.0, 16.0):
        await store.publish(3, evaluate=True)
        _, (work,) = await hand_out(store, 16)
        await answer(store, work, score_sum=score_sum)
        scores += [report.score for report in await store.eval_reports((await store.snapshot()).evaluated)]
        await redis.delete(*[key async for key in redis.scan_iter(f"{run_prefix(run_name)}:*")])
        assert await store.eval_reports((await store.snapshot()).evaluated) == []
    assert scores == [0.0, 1.0]


async def test_a_slice_that_is_answered_twice_counts_once(store: Ledger) -> None:
    await store.publish(3, evaluate=True)
    _, (first, second) = await hand_out(store, EVAL_SLICE + 1)
    assert await answer(store, first, score_sum=64.0) == "evaluated"
    assert await answer(store, first, score_sum=64.0) == "duplicate"
    assert (await store.snapshot()).evaluated == []
    await answer(store, second, score_sum=1.0)
    (report,) = await store.eval_reports((await store.snapshot()).evaluated)
    assert (report.tasks, report.score) == (65, 1.0)


async def test_an_answer_that_redis_does_not_take_leaves_its_slice_as_it_was(store: Ledger) -> None:
    await store.publish(3, evaluate=True)
    _, (work,) = await hand_out(store, 10)
    with pytest.raises(ResponseError):
        await answer(store, work, score_sum=math.inf)
    assert await answer(store, work, score_sum=5.0) == "evaluated"
    (report,) = await store.eval_reports((await store.snapshot()).evaluated)
    assert (report.tasks, report.score) == (10, 0.5)


async def test_a_slice_that_is_lost_on_its_way_comes_back_although_the_clock_was_set_back(
    store: Ledger, redis: Redis, run_name: str
) -> None:
    await store.publish(3, evaluate=True)
    await join(store, "r0")
    _, (lost,) = await hand_out(store, 10)
    await redis.hincrbyfloat(f"{run_prefix(run_name)}:eval_since:3", "0:10", LATER_S)
    assert [await store.heartbeat("r0", held=[], grace_s=-1.0) for _ in range(2)] == [0, 1]
    assert await hand_out(store, 10) == (0, [EvalSlice(f"{lost.id}-2", 0, 10)])


async def test_an_answer_that_nobody_asked_for_is_void(store: Ledger) -> None:
    await store.publish(3, evaluate=True)
    assert await answer(store, EvalSlice("e3-0", 0, 10)) == "void", "not handed out"
    _, (work,) = await hand_out(store, 10)
    assert await answer(store, work, version=4) == "void"
    assert await answer(store, EvalSlice(work.id, 0, 9)) == "void"
    assert await answer(store, work) == "evaluated"


async def test_the_answers_are_kept_until_the_next_evaluation(store: Ledger, redis: Redis, run_name: str) -> None:
    await store.publish(3, evaluate=True)
    _, (work,) = await hand_out(store, 10)
    await answer(store, work)
    await store.publish(4, evaluate=False)
    assert await redis.get(group_key(run_name, work.id)) == b"answers"
    await store.publish(5, evaluate=True)
    assert not await redis.exists(group_key(run_name, work.id))


async def test_of_an_evaluation_that_is_over_only_the_figures_are_kept(
    store: Ledger, redis: Redis, run_name: str
) -> None:
    prefix = f"{run_prefix(run_name)}:"

    async def keys() -> set[str]:
        return {key.decode().removeprefix(prefix) async for key in redis.scan_iter(f"{prefix}eval*")}

    await store.publish(3, evaluate=True)
    await join(store, "r0")
    _, (answered, failed, _) = await hand_out(store, 3 * EVAL_SLICE)
    await answer(store, answered)
    await store.evaluation_failed(failed.id)
    kinds = ("eval_todo", "eval_issued", "eval_since", "eval_holder", "eval_handed", "eval_failures")
    assert await keys() == {"eval:3", "eval:3:groups", *(f"{kind}:3" for kind in kinds)}
    await store.publish(4, evaluate=True)
    assert await keys() == {"eval:3", "eval_reports"}


async def test_what_is_left_of_an_evaluation_has_failed_when_the_next_one_is_asked_for(store: Ledger) -> None:
    await store.publish(3, evaluate=True)
    await join(store, "r0")
    _, (first, _) = await hand_out(store, 2 * EVAL_SLICE)
    await answer(store, first, score_sum=16.0)
    for version in (4, 5, 5):
        await store.publish(version, evaluate=True)
    cut, never_begun = await store.eval_reports((await store.snapshot()).evaluated)
    assert (cut.version, cut.score, cut.tasks, cut.failed) == (3, 0.25, EVAL_SLICE, EVAL_SLICE)
    assert (never_begun.version, never_begun.tasks, never_begun.failed) == (4, 0, 0)


async def test_an_evaluation_that_is_over_does_not_end_again_when_the_next_one_is_asked_for(store: Ledger) -> None:
    await store.publish(3, evaluate=True)
    _, (work,) = await hand_out(store, 10)
    await answer(store, work)
    await store.publish(4, evaluate=True)
    assert (await store.snapshot()).evaluated == [3]


async def test_asking_twice_for_an_evaluation_starts_it_once(store: Ledger) -> None:
    await store.publish(3, evaluate=True)
    await hand_out(store, 10)
    await store.publish(3, evaluate=True)
    assert await hand_out(store, 10) == (0, [])


async def test_evaluation_takes_nothing_from_the_ledger(store: Ledger) -> None:
    await store.publish(3, evaluate=True)
    _, (work,) = await hand_out(store, 10)
    await answer(store, work)
    assert await states(store) == {}
