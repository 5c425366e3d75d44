"""Evaluations in the ledger: slices of the held-out tasks are issued, answered and reported."""

import math
from collections.abc import Mapping

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from slipstream.buffer.store.evaluations import EVAL_RETRIES, MOST_EVAL_TASKS
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import run_prefix
from slipstream.buffer.store.types import EvalSlice
from slipstream.buffer.wire import messages as m
from tests.buffer.ledger import AT_ONCE_S, LATER_S, heartbeat, ledger, ruled, states

ALL = 10**6
"""A share that no evaluation exceeds."""


@pytest.fixture
async def store(redis: Redis, run_name: str) -> Ledger:
    """A ledger in which version 3 is under evaluation."""
    store = ledger(redis, run_name)
    await store.publish(3, evaluate=True)
    return store


async def report(store: Ledger) -> m.EvalReport:
    """The only report."""
    (found,) = await store.evaluations.reports((await store.snapshot()).evaluated)
    return found


async def evaluate(
    store: Ledger, tasks: int, *, server: str = "r0", version: int = 3, share: int = ALL, deadline_s: float = LATER_S
) -> tuple[int, list[EvalSlice]]:
    """Ranges left and slices issued to a server, of that many held-out tasks."""
    store = ruled(store, ticket_deadline_s=deadline_s)
    return await store.evaluations.grant(version, server=server, eval_tasks=tasks, share=share)


async def join(store: Ledger, *servers: str) -> None:
    for server in servers:
        await store.join(server, "1")


async def answer(
    store: Ledger,
    work: EvalSlice,
    *,
    score_sum: float = 0.0,
    version: int = 3,
    failures: Mapping[str, int] | None = None,
) -> str:
    tallies = {"score": (score_sum, score_sum)}  # rewards of 0 and 1
    return await store.evaluations.record(
        work, version=version, failures=failures or {}, tallies=tallies, blob=b"answers"
    )


async def fail(store: Ledger, work: EvalSlice, *, ignored_failures: int = 0) -> str:
    return await store.evaluations.record_failure(work.id, reason="env_error", ignored_failures=ignored_failures)


async def test_eval_tasks_are_issued_once(store: Ledger) -> None:
    assert (await store.snapshot()).evaluating == 3
    left, first = await evaluate(store, 133, server="r0", share=100)
    assert first == [EvalSlice("e3-0", 0, 64), EvalSlice("e3-64", 64, 36)]
    assert left == (await store.snapshot()).slices_left == 1
    assert await evaluate(store, 133, server="r1", share=100) == (0, [EvalSlice("e3-100", 100, 33)])
    assert await evaluate(store, 133, server="r1", share=100) == (0, [])


async def test_server_holds_at_most_its_share(store: Ledger) -> None:
    _, (first,) = await evaluate(store, 100, share=20)
    assert await evaluate(store, 100, share=20) == (1, [])
    assert await evaluate(store, 100, share=25) == (1, [EvalSlice("e3-20", 20, 5)])
    await answer(store, first)
    assert await evaluate(store, 100, share=25) == (1, [EvalSlice("e3-25", 25, 20)])


async def test_returned_slice_may_be_split(store: Ledger) -> None:
    await join(store, "gone")
    _, (lost,) = await evaluate(store, 10, server="gone")
    await store.leave("gone", "1")
    _, (first,) = await evaluate(store, 10, server="r0", share=6)
    _, (second,) = await evaluate(store, 10, server="r1", share=6)
    assert (first, second) == (EvalSlice("e3-0-2", 0, 6), EvalSlice("e3-6", 6, 4))
    assert await answer(store, lost) == "void"
    assert [await answer(store, each) for each in (first, second)] == ["evaluated"] * 2
    assert (await report(store)).tasks == 10


async def test_only_evaluated_version_gets_slices(store: Ledger) -> None:
    for version in (2, 4):
        assert await evaluate(store, 10, version=version) == (0, [])
    await evaluate(store, 10)
    for version in (2, 3):  # repeated, late requests
        await store.publish(version, evaluate=True)
    assert (await store.snapshot()).evaluating == 3
    assert await evaluate(store, 10) == (0, [])


async def test_evaluation_without_tasks_ends_at_once(store: Ledger) -> None:
    for _ in range(2):
        assert await evaluate(store, 0) == (0, [])
    assert (await store.snapshot()).evaluated == [3]
    found = await report(store)
    assert (found.tasks, found.failures, found.score, found.group_ids) == (0, {}, 0.0, [])


async def test_expired_slice_is_reissued(store: Ledger) -> None:
    _, (lost,) = await evaluate(store, 2 * MOST_EVAL_TASKS, share=MOST_EVAL_TASKS, deadline_s=AT_ONCE_S)
    assert (await store.sweep(silent_s=None)).slices == 1
    _, (other,) = await evaluate(store, 2 * MOST_EVAL_TASKS, server="r0", share=MOST_EVAL_TASKS)
    _, (again,) = await evaluate(store, 2 * MOST_EVAL_TASKS, server="r1", share=MOST_EVAL_TASKS)
    assert (other.first, again) == (MOST_EVAL_TASKS, EvalSlice("e3-0-2", 0, MOST_EVAL_TASKS)), "a new ticket"
    assert await evaluate(store, 2 * MOST_EVAL_TASKS) == (0, [])
    assert await answer(store, lost) == "evaluated", "the first answer counts"
    assert await answer(store, lost) == "duplicate"
    assert await answer(store, again) == "void"
    assert (await store.sweep(silent_s=None)).slices == 0


async def test_slice_is_dropped_after_retries(store: Ledger) -> None:
    tasks = MOST_EVAL_TASKS + 5
    _, (bad, good) = await evaluate(store, tasks)
    await answer(store, good, score_sum=4.0)
    for _ in range(EVAL_RETRIES):
        assert await fail(store, bad) == "filtered"
        _, (bad,) = await evaluate(store, tasks)
    assert (await store.snapshot()).evaluated == []
    assert await fail(store, bad) == "filtered"
    assert await evaluate(store, tasks) == (0, [])
    assert await answer(store, bad) == "void"
    found = await report(store)
    assert (found.tasks, found.failures, found.score) == (5, {"env_error": MOST_EVAL_TASKS}, 0.8)


async def test_failed_tasks_are_reported_by_reason(store: Ledger) -> None:
    _, (first, second) = await evaluate(store, MOST_EVAL_TASKS + 36)
    await answer(store, first, score_sum=29.0, failures={"superseded": 4, "reward_error": 2})
    await answer(store, second, score_sum=1.0, failures={"superseded": 34})
    found = await report(store)
    assert (found.tasks, found.failures) == (60, {"superseded": 38, "reward_error": 2})
    assert (found.score, found.lower_bound, found.coverage) == (0.5, 0.3, 0.6)
    assert found.estimates == {"score_interval": pytest.approx(1.96 * math.sqrt(0.25 / 59))}


async def test_slice_of_silent_server_is_reissued(store: Ledger, redis: Redis, run_name: str) -> None:
    await join(store, "gone", "r0")
    _, (lost,) = await evaluate(store, 2 * MOST_EVAL_TASKS, server="gone", share=MOST_EVAL_TASKS)
    _, (kept,) = await evaluate(store, 2 * MOST_EVAL_TASKS, server="r0")
    await redis.zadd(f"{run_prefix(run_name)}:heard", {"gone": 0.0})
    swept = await store.sweep(silent_s=LATER_S)
    assert (swept.silent, swept.slices) == (["gone"], 1)
    assert await evaluate(store, 2 * MOST_EVAL_TASKS) == (0, [EvalSlice(f"{lost.id}-2", lost.first, lost.tasks)])
    assert await answer(store, kept) == "evaluated"


async def test_report_after_last_slice(store: Ledger) -> None:
    _, (first, second) = await evaluate(store, MOST_EVAL_TASKS + 16)
    assert await answer(store, first, score_sum=40.0) == "evaluated"
    assert await answer(store, first, score_sum=40.0) == "duplicate"
    assert (await store.snapshot()).evaluated == []
    assert await answer(store, second, score_sum=8.0) == "evaluated"
    for _ in range(2):
        found = await report(store)
        assert (found.version, found.tasks, found.score) == (3, 80, 0.6)
        assert found.group_ids == ["e3-0", "e3-64"]
        assert 0 <= found.eval_s < 60
        await store.publish(4, evaluate=True)  # does not end the finished one again
    assert await states(store) == {}


async def test_lost_evaluation_is_reported_again(store: Ledger, redis: Redis, run_name: str) -> None:
    scores = []
    for score_sum in (0.0, 16.0):
        await store.publish(3, evaluate=True)
        _, (work,) = await evaluate(store, 16)
        await answer(store, work, score_sum=score_sum)
        scores += [report.score for report in await store.evaluations.reports((await store.snapshot()).evaluated)]
        await redis.delete(*[key async for key in redis.scan_iter(f"{run_prefix(run_name)}:*")])
        assert await store.evaluations.reports((await store.snapshot()).evaluated) == []
    assert scores == [0.0, 1.0]


async def test_rejected_answer_keeps_slice(store: Ledger) -> None:
    _, (work,) = await evaluate(store, 10)
    with pytest.raises(ResponseError):
        await answer(store, work, score_sum=math.inf)
    assert await answer(store, work, score_sum=5.0) == "evaluated"
    found = await report(store)
    assert (found.tasks, found.score) == (10, 0.5)


async def test_lost_slice_returns_despite_clock_set_back(store: Ledger, redis: Redis, run_name: str) -> None:
    await join(store, "r0")
    _, (lost,) = await evaluate(store, 10)
    await redis.hincrbyfloat(f"{run_prefix(run_name)}:eval_since:3", "0:10", LATER_S)
    assert [await heartbeat(store, "r0", [], grace_s=-1.0) for _ in range(2)] == [0, 1]
    assert await evaluate(store, 10) == (0, [EvalSlice(f"{lost.id}-2", 0, 10)])


async def test_unrequested_answer_is_void(store: Ledger) -> None:
    assert await answer(store, EvalSlice("e3-0", 0, 10)) == "void", "not issued"
    _, (work,) = await evaluate(store, 10)
    assert await answer(store, work, version=4) == "void"
    assert await answer(store, EvalSlice(work.id, 0, 9)) == "void"
    assert await answer(store, work) == "evaluated"


async def test_finished_evaluation_keeps_only_report(store: Ledger, redis: Redis, run_name: str) -> None:
    prefix = f"{run_prefix(run_name)}:"

    async def keys() -> set[str]:
        return {key.decode().removeprefix(prefix) async for key in redis.scan_iter(f"{prefix}eval*")}

    _, (answered, failed, _) = await evaluate(store, 4 * MOST_EVAL_TASKS, share=3 * MOST_EVAL_TASKS)
    await answer(store, answered)
    await fail(store, failed)
    kinds = ("eval_todo", "eval_issued", "eval_since", "eval_holder", "eval_handed", "eval_failures")
    assert await keys() == {"eval:3", "eval:3:groups", *(f"{kind}:3" for kind in kinds)}
    await store.publish(4, evaluate=True)
    assert await keys() == {"eval:3", "eval_reports"}


async def test_next_evaluation_fails_unanswered_slices(store: Ledger) -> None:
    _, (first, _) = await evaluate(store, 2 * MOST_EVAL_TASKS)
    await answer(store, first, score_sum=16.0)
    for version in (4, 5, 5):
        await store.publish(version, evaluate=True)
    cut, never_begun = await store.evaluations.reports((await store.snapshot()).evaluated)
    assert (cut.version, cut.score, cut.tasks) == (3, 0.25, MOST_EVAL_TASKS)
    assert (cut.failures, cut.lower_bound, cut.coverage) == ({"unfinished": MOST_EVAL_TASKS}, 0.125, 0.5)
    assert (never_begun.version, never_begun.tasks, never_begun.failures) == (4, 0, {})
