"""Held tickets, delayed failures, and the limit of the groups in flight."""

from collections.abc import Sequence

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout_servers.engines.base import Pressure
from slipstream.rollout_servers.tickets import (
    DECREASE,
    FREE_FAILURES,
    INCREASE,
    KV_CACHE_HIGH,
    LONGEST_DELAY_S,
    ConcurrencyLimiter,
    FailureBackoff,
    FirstFailures,
    TicketBook,
)

CALM = Pressure(kv_cache_usage=0.5, preemptions=0)
FULL = Pressure(kv_cache_usage=0.99, preemptions=0)
PRESSURES = st.builds(Pressure, kv_cache_usage=st.floats(0, 1), preemptions=st.integers(0, 5))
READINGS = st.lists(st.tuples(PRESSURES, st.integers(0, 100)), max_size=50)


def test_a_ticket_is_accepted_once_and_held_until_settled() -> None:
    book = TicketBook()
    assert [book.accept(name, "first") for name in "aba"] == [True, True, False]
    assert book.held == ["a", "b"]
    book.settle("a")
    assert book.held == ["b"]
    assert not book.accept("a", "first")
    assert book.held == ["b"]


def test_a_settled_id_under_a_new_grant_is_another_ticket() -> None:
    book = TicketBook()
    book.accept("a", "first")
    assert not book.accept("a", "second"), "the group in work serves for both"
    book.settle("a")
    assert book.accept("a", "second")
    book.settle("a")
    assert [book.accept("a", grant) for grant in ("first", "second", "third")] == [False, False, True]


def test_the_latest_settled_and_all_held_tickets_are_remembered() -> None:
    book = TicketBook(settled_kept=2)
    book.accept("held", "first")
    for name in "abc":
        book.accept(name, "first")
        book.settle(name)
    assert [book.accept(name, "first") for name in ("c", "b", "a", "held")] == [False, False, True, False]


@pytest.mark.parametrize(
    ("outcomes", "examined"),
    [
        (["prompt_too_long"] * 5, [3]),
        (["prompt_too_long", "image_unreadable", *["prompt_too_long"] * 3], []),
        (["", *["prompt_too_long"] * 3], []),
        (["prompt_too_long", "prompt_too_long", "", "prompt_too_long"], []),
        (["generation_timeout"] * 4, []),
        (["env_error"] * 4, []),
        (["reward_unavailable", *["prompt_empty"] * 3], []),
    ],
)
def test_same_certain_failure_of_the_first_groups_is_examined(outcomes: Sequence[str], examined: list[int]) -> None:
    first, found = FirstFailures(), []
    for number, reason in enumerate(outcomes, start=1):
        if not reason:
            first.record_success()
        elif first.record_failure(reason):
            found.append(number)
    assert found == examined


def test_delays_double_with_failures_and_a_success_ends_them() -> None:
    backoff = FailureBackoff()
    with structlog.testing.capture_logs() as logs:
        assert [backoff.record_failure("env_error") for _ in range(FREE_FAILURES)] == [0.0] * FREE_FAILURES
        assert [backoff.record_failure("env_error") for _ in range(3)] == [0.1, 0.2, 0.4]
        assert [backoff.record_failure("env_error") for _ in range(2000)][-1] == LONGEST_DELAY_S
        backoff.record_success()
        assert backoff.record_failure("env_error") == 0.0
    assert [line["log_level"] for line in logs] == ["warning", "info"]


def test_single_failures_are_not_delayed() -> None:
    backoff = FailureBackoff()
    for _ in range(FREE_FAILURES):
        assert backoff.record_failure("prompt_too_long") == 0.0
        backoff.record_success()
    assert backoff.record_failure("prompt_too_long") == 0.0


@given(st.integers(1, 40), st.integers(1, 64), READINGS)
def test_the_limit_stays_between_least_and_most(
    least: int, most: int, readings: Sequence[tuple[Pressure, int]]
) -> None:
    limiter = ConcurrencyLimiter(least, most)
    for pressure, groups in readings:
        assert min(least, most) <= limiter.observe(pressure, groups=groups) <= most


@given(st.integers(1, 40), st.integers(1, 64), st.integers(0, 64), st.integers(1, 20))
def test_without_pressure_the_limit_stays_at_the_most(least: int, most: int, groups: int, times: int) -> None:
    limiter = ConcurrencyLimiter(least, most)
    calm = Pressure(kv_cache_usage=KV_CACHE_HIGH, preemptions=0)
    assert {limiter.observe(calm, groups=min(groups, most)) for _ in range(times)} == {most}


@given(st.integers(1, 40), st.integers(2, 64), st.integers(1, 64))
def test_the_limit_oscillates_around_the_engines_room(least: int, most: int, room: int) -> None:
    """An engine that preempts whenever more than `room` groups run, each of which ends before the next reading."""
    limiter = ConcurrencyLimiter(least, most)
    limits, preemptions = [], 0
    for _ in range(300):
        preemptions += limiter.limit > room
        limits.append(limiter.observe(Pressure(kv_cache_usage=0.0, preemptions=preemptions), groups=limiter.limit))
    least, late = min(least, most), limits[200:]
    assert max(late) <= max(least, min(most, room + INCREASE))
    if least <= room < most:
        # One step over the room, and what that is decreased to, are the ends of the oscillation.
        assert min(late) >= max(least, int((room + 1) * DECREASE))


def test_pressure_halves_the_limit_and_calm_adds_one() -> None:
    limiter = ConcurrencyLimiter(1, 32)
    assert [limiter.observe(FULL, groups=8) for _ in range(2)] == [16, 8]
    assert [limiter.observe(CALM, groups=8) for _ in range(3)] == [9, 10, 11]


@pytest.mark.parametrize(
    ("counts", "limits"),
    [((3, 3, 4), [16, 17, 8]), ((7, 0, 2), [16, 17, 8]), ((7, 2, 2), [16, 8, 9])],
    ids=["same-engine", "new-engine", "new-engine-preempts"],
)
def test_new_preemptions_are_pressure(counts: Sequence[int], limits: Sequence[int]) -> None:
    limiter = ConcurrencyLimiter(1, 32)
    readings = [Pressure(kv_cache_usage=0.1, preemptions=count) for count in counts]
    assert [limiter.observe(pressure, groups=8) for pressure in readings] == limits


def test_one_congestion_lowers_the_limit_once() -> None:
    limiter = ConcurrencyLimiter(1, 32)
    assert limiter.observe(FULL, groups=32) == 16
    assert [limiter.observe(FULL, groups=groups) for groups in (32, 25, 17)] == [16] * 3
    assert limiter.observe(CALM, groups=17) == 16, "not yet clear whether it was enough"
    assert limiter.observe(FULL, groups=16) == 8
