"""The limit of the groups in flight, with single readings and with a simulated engine."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.configs import RunConfig
from slipstream.rollout_servers.concurrency import Cause, ConcurrencyLimiter
from slipstream.rollout_servers.engines.base import Pressure
from tests.rollout_servers.simulated_engine import SimulatedEngine, Workload, run, speed

SIZE, SEQUENCES = 8, 512
ROOMY = Pressure(kv_cache_usage=0.25, preemptions=0, running=64)
FULL = Pressure(kv_cache_usage=0.98, preemptions=0, running=64, waiting=192)


def limiter(start: int, most: int = SEQUENCES, *, group_size: int = SIZE) -> ConcurrencyLimiter:
    return ConcurrencyLimiter(start, most, group_size=group_size, max_sequences=SEQUENCES)


# --- single readings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pressure", "groups", "finished", "limit", "cause"),
    [
        (ROOMY, 16, 16, 64, Cause.ROOM),  # four times as much fits
        (ROOMY, 16, 4, 28, Cause.ROOM),  # each finished group adds at most three
        (ROOMY, 16, 0, 16, None),
        (ROOMY, 15, 16, 16, None),  # there was no ticket for another one
        (Pressure(0.02, 0, running=64), 16, 16, 64, Cause.ROOM),
        (Pressure(0.97, 0, running=64), 16, 16, 17, Cause.ROOM),  # until some wait
        (Pressure(0.97, 0, running=64, waiting=5), 16, 16, 16, None),
        (Pressure(0.25, 0, running=512, waiting=26), 16, 16, 16, None),  # all sequences
        (Pressure(0.25, 0, running=64, waiting=9), 16, 16, 16, None),  # for something else
        (Pressure(0.97, 0, running=64, waiting=8), 16, 16, 16, None),  # these keep the engine busy
        (FULL, 16, 0, 8, Cause.QUEUE),
        (Pressure(0.98, 0, running=64, waiting=12), 16, 0, 15, Cause.QUEUE),
        (Pressure(0.25, 0, running=64, waiting=192), 16, 0, 16, None),
        (Pressure(0.97, 257, running=64), 16, 16, 14, Cause.PREEMPTED),
        (Pressure(0.97, 255, running=64), 16, 16, 16, None),
        (Pressure(0.25, 129, running=64), 16, 16, 16, None),  # too many to grow
        (Pressure(0.97, 500, running=64), 16, 7, 16, None),  # too few groups to judge by
        (FULL, 17, 16, 16, None),  # an earlier move has not taken effect
        (Pressure(0.5, 0), 16, 16, 16, None),  # an engine without counts
        (Pressure(0.0, 257), 16, 16, 14, Cause.PREEMPTED),
    ],
)
def test_reading_moves_the_limit(
    pressure: Pressure, groups: int, finished: int, limit: int, cause: Cause | None
) -> None:
    subject = limiter(16)
    assert subject.observe(Pressure(0.0, 0), groups=0, finished=0) is None
    move = subject.observe(pressure, groups=groups, finished=finished)
    assert subject.limit == limit
    assert (move and (move.before, move.limit, move.cause)) == (cause and (16, limit, cause))
    assert subject.move is move


@given(
    st.integers(1, 64),
    st.integers(1, 64),
    st.lists(
        st.tuples(
            st.builds(
                Pressure, st.floats(0, 1), st.integers(0, 300), running=st.integers(0, 512), waiting=st.integers(0, 512)
            ),
            st.integers(0, 100),
            st.integers(0, 30),
        ),
        max_size=50,
    ),
)
def test_limit_stays_between_one_and_the_most(
    start: int, most: int, readings: Sequence[tuple[Pressure, int, int]]
) -> None:
    subject, finished = limiter(start, most), 0
    for pressure, groups, further in readings:
        finished += further
        before = subject.limit
        move = subject.observe(pressure, groups=groups, finished=finished)
        assert 1 <= subject.limit <= most
        assert (move is None) == (subject.limit == before)


def test_a_configured_number_is_not_exceeded_and_falls_with_the_engine() -> None:
    assert limiter(16, 16).observe(ROOMY, groups=16, finished=16) is None
    subject = limiter(16, 16)
    limits = [subject.observe(FULL, groups=groups, finished=16) and subject.limit for groups in (16, 12, 8)]
    assert limits == [8, None, 4], "one congestion lowers it once"
    for finished in range(20, 100, 4):
        subject.observe(ROOMY, groups=subject.limit, finished=finished)
    assert subject.limit == 16


def test_episodes_at_their_tools_leave_room_for_others() -> None:
    subject = limiter(SEQUENCES // SIZE)
    subject.observe(Pressure(0.25, 0, running=450), groups=64, finished=64)
    assert subject.limit == 76
    subject.pause()
    assert subject.observe(Pressure(0.25, 0, running=512, waiting=24), groups=76, finished=140) is None


def test_a_new_engines_preemptions_count_from_zero() -> None:
    subject = limiter(16)
    moves = [
        subject.observe(Pressure(0.97, count, running=64, waiting=5), groups=16, finished=16 * number)
        for number, count in enumerate((100, 100, 5, 5, 262))
    ]
    assert [move and move.limit for move in moves] == [None] * 4 + [14]


def test_a_pause_forgets_earlier_readings() -> None:
    subject = limiter(16)
    subject.observe(Pressure(0.97, 0, running=64), groups=16, finished=0)
    subject.observe(Pressure(0.97, 200, running=64), groups=16, finished=4)
    subject.pause()
    assert subject.observe(Pressure(0.97, 300, running=64), groups=16, finished=16) is None


@pytest.mark.parametrize(("groups_in_flight", "start"), [("auto", 12), (5, 5)])
def test_auto_begins_with_the_sequences_of_the_engine(groups_in_flight: int | str, start: int) -> None:
    rollout = {"groups_in_flight": groups_in_flight, "group_size": 5, "engine": {"max_sequences": 64}}
    config = RunConfig.model_validate({"model": {"path": "/nowhere"}, "rollout": rollout})
    subject = ConcurrencyLimiter.of(config.rollout)
    assert subject.limit == start
    for finished in range(0, 3000, 10):
        subject.observe(Pressure(0.1, 0, running=5), groups=subject.limit, finished=finished)
    assert subject.limit == (64 if groups_in_flight == "auto" else 5)


# --- a simulated engine -----------------------------------------------------------------------------------------------

FIXED = (4, 8, 12, 16, 18, 20, 24, 32, 64)


@pytest.mark.parametrize(
    ("work", "fixed"),
    [
        (Workload(), FIXED),
        (Workload(sigma=1.5), FIXED),
        (Workload(prefill_cost=1 / 50), FIXED),
        (Workload(cache_tokens=32768), (48, 64, 80, 96, 128)),
        (Workload(group_size=2), (40, 64, 80, 96)),
        (Workload(max_sequences=48), FIXED),
        (Workload(update_every=100), FIXED),
    ],
    ids=["", "longer-tail", "costly-prefill", "larger-cache", "pairs", "few-sequences", "updates"],
)
def test_auto_reaches_the_best_fixed_number_from_both_sides(work: Workload, fixed: Sequence[int]) -> None:
    best = max(speed(work, number, warm_up=500, steps=3000)[0] for number in fixed)
    _, oldest = speed(work, 2 * fixed[-1], warm_up=3000, steps=500)
    for start in (1, 2 * fixed[-1]):
        subject = ConcurrencyLimiter(start, 512, group_size=work.group_size, max_sequences=work.max_sequences)
        found, age = speed(work, subject, warm_up=3000, steps=3000)
        assert found >= 0.92 * best, start
        assert age < 0.7 * oldest


def test_auto_follows_lengths_that_change() -> None:
    short, long, subject, limits = Workload(), Workload(median_tokens=100), limiter(16), list[int]()
    engine = SimulatedEngine(short)
    for engine.work in (short, long, short):
        run(engine, subject, steps=3000)
        limits.append(subject.limit)
    assert limits[1] < 0.8 * min(limits[0], limits[2])
