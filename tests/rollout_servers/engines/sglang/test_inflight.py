"""Requests in flight: answers kept after a crash, aborts, concurrent calls."""

import asyncio
from dataclasses import replace

import pytest

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.rollout_servers.engines.base import Completion, EngineError, RequestRefused
from slipstream.rollout_servers.engines.sglang.engine import abort_at, abort_on_error, all_or_none
from slipstream.rollout_servers.engines.sglang.transfer import InFlight

LONG_S = 60.0


def answer(*token_ids: int, end: str = "abort", version: int = 4) -> Completion:
    spans = [VersionSpan(version=version, start=0, end=len(token_ids))]
    return Completion(token_ids, [-float(token) for token in token_ids], spans, end)


def test_all_tokens_of_the_first_version_are_kept() -> None:
    answers = [answer(7)]
    in_flight = InFlight(4, lambda: answers)
    answers[0] = answer(7, 8)
    assert in_flight.left(4) == [answer(7, 8)]
    in_flight.before_update(4)  # which crashes the server
    assert in_flight.left(4) == [answer(7, 8)]


def test_only_tokens_before_the_first_update_are_kept() -> None:
    answers = [answer(7, 8), answer()]
    in_flight = InFlight(4, lambda: answers)
    in_flight.before_update(4)
    answers[:] = [answer(7, 8, 9), answer(5)]
    in_flight.before_update(5)
    answers[:] = [answer(7, 8, 9, 6), answer(5, 3)]
    assert in_flight.left(6) == [answer(7, 8), replace(answer(), spans=[])]


def test_finished_answer_is_kept_with_its_versions() -> None:
    answers = [answer(7), answer(6)]
    in_flight = InFlight(4, lambda: answers)
    in_flight.before_update(4)
    answers[0] = answer(7, 8, 9, end="stop", version=5)
    assert in_flight.left(5) == [answer(7, 8, 9, end="stop", version=5), answer(6)]


def test_no_token_of_a_request_sent_during_an_update_is_kept() -> None:
    in_flight = InFlight(4, lambda: [answer(7)])
    assert in_flight.left(5) is None
    in_flight.before_update(5)
    assert in_flight.left(6) is None


class Aborts:
    """Counts aborts; `enough` is set with the third."""

    def __init__(self) -> None:
        self.number = 0
        self.enough = asyncio.Event()

    async def __call__(self) -> None:
        self.number += 1
        if self.number == 3:
            self.enough.set()


async def test_abort_is_repeated_after_the_deadline() -> None:
    abort = Aborts()
    async with asyncio.timeout(LONG_S), abort_at(abort, deadline_s=0.01):
        await abort.enough.wait()


async def test_nothing_is_aborted_after_a_normal_end() -> None:
    abort = Aborts()
    async with abort_at(abort, deadline_s=0.01), abort_on_error(abort):
        pass
    async with asyncio.timeout(LONG_S):
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)
    assert abort.number == 0


@pytest.mark.parametrize("error", [EngineError("dead"), RequestRefused("no"), asyncio.CancelledError()])
async def test_failed_or_cancelled_request_is_aborted_once(error: BaseException) -> None:
    abort = Aborts()
    with pytest.raises(type(error)):
        async with abort_on_error(abort):
            raise error
    assert abort.number == 1


async def fails() -> None:
    raise EngineError("no")


async def test_first_failure_cancels_the_other_calls() -> None:
    cancelled = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(EngineError, match="no"):
        await all_or_none([waits(), fails()])
    assert cancelled.is_set()


async def test_calls_run_concurrently() -> None:
    there = asyncio.Barrier(3)
    async with asyncio.timeout(LONG_S):
        await all_or_none(there.wait() for _ in range(3))


async def test_timeout_after_a_failure_is_no_cancellation() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            with pytest.raises(EngineError):
                await all_or_none([fails()])
            await asyncio.Event().wait()


async def test_cancelling_waits_for_the_end_of_all_calls() -> None:
    running = ended = 0

    async def waits() -> None:
        nonlocal running, ended
        running += 1
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended += 1

    waiting = asyncio.create_task(all_or_none([waits(), waits(), waits()]))
    while running < 3:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == 3
