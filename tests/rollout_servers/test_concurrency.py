"""How many groups a server takes on."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.configs import RunConfig
from slipstream.rollout_servers.engines.base import Engine, Pressure
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.tickets import DECREASE, INCREASE, KV_CACHE_HIGH, Concurrency

MOST = 8
GROUPS = 80
"""With 40, what is thrown away was 0.24 to 0.67 of what it is otherwise, as the machine was busy."""
DEADLINE_S = 100.0

NONE = Pressure(kv_cache_usage=0.5, preemptions=0)
FULL = Pressure(kv_cache_usage=0.99, preemptions=0)

looks = st.lists(
    st.tuples(
        st.builds(Pressure, kv_cache_usage=st.floats(0, 1), preemptions=st.integers(0, 5)),
        st.integers(0, 100),
    ),
    max_size=50,
)


@given(st.integers(1, 40), st.integers(1, 64), looks)
def test_the_limit_is_never_below_the_least_nor_above_the_most(
    least: int, most: int, looks: Sequence[tuple[Pressure, int]]
) -> None:
    subject = Concurrency(least, most)
    for pressure, groups in looks:
        assert min(least, most) <= subject.observe(pressure, groups=groups) <= most


@given(st.integers(1, 40), st.integers(1, 64), st.integers(0, 64), st.integers(1, 20))
def test_without_pressure_a_server_takes_on_all_that_it_may(least: int, most: int, groups: int, times: int) -> None:
    subject = Concurrency(least, most)
    calm = Pressure(kv_cache_usage=KV_CACHE_HIGH, preemptions=0)
    assert {subject.observe(calm, groups=min(groups, most)) for _ in range(times)} == {most}


@given(st.integers(1, 40), st.integers(2, 64), st.integers(1, 64))
def test_the_limit_comes_to_swing_around_what_the_engine_can_hold(least: int, most: int, room: int) -> None:
    """An engine that preempts whenever more than `room` groups run, each of which ends before the next look."""
    subject = Concurrency(least, most)
    limits, preemptions = [], 0
    for _ in range(300):
        preemptions += subject.limit > room
        limits.append(subject.observe(Pressure(kv_cache_usage=0.0, preemptions=preemptions), groups=subject.limit))
    least, late = min(least, most), limits[200:]
    assert max(late) <= max(least, min(most, room + INCREASE))
    if least <= room < most:
        # One step over the room and what that is decreased to are the ends of the swing.
        assert min(late) >= max(least, int((room + 1) * DECREASE))


def test_pressure_takes_a_share_away_and_calm_gives_it_back_bit_by_bit() -> None:
    subject = Concurrency(1, 32)
    assert [subject.observe(FULL, groups=8) for _ in range(2)] == [16, 8]
    assert [subject.observe(NONE, groups=8) for _ in range(3)] == [9, 10, 11]


def test_preemptions_since_the_last_look_are_pressure_and_older_ones_are_not() -> None:
    subject = Concurrency(1, 32)
    seen = [subject.observe(Pressure(kv_cache_usage=0.1, preemptions=count), groups=8) for count in (3, 3, 4)]
    assert seen == [16, 17, 8]


@pytest.mark.parametrize(("counts", "limits"), [((7, 0, 2), [16, 17, 8]), ((7, 2, 2), [16, 8, 9])])
def test_the_preemptions_of_a_new_engine_are_counted_from_its_start(
    counts: Sequence[int], limits: Sequence[int]
) -> None:
    subject = Concurrency(1, 32)
    seen = [subject.observe(Pressure(kv_cache_usage=0.1, preemptions=count), groups=8) for count in counts]
    assert seen == limits


def test_one_congestion_takes_a_share_away_once() -> None:
    subject = Concurrency(1, 32)
    assert subject.observe(FULL, groups=32) == 16
    assert [subject.observe(FULL, groups=groups) for groups in (32, 25, 17)] == [16] * 3
    assert subject.observe(NONE, groups=17) == 16, "not yet clear whether it was enough"
    assert subject.observe(FULL, groups=16) == 8


# vLLM and what it imports warn of their own futures.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
async def test_a_server_that_heeds_the_pressure_of_vllm_has_less_work_thrown_away(model: Path) -> None:
    """A KV cache of 60 blocks holds 20 answers of 3 blocks; 8 groups have 32."""
    tiny = {
        "core": "inline",
        "max_model_len": 256,
        "max_sequences": 64,
        "kv_cache_bytes": 1 << 20,
        "options": {"block_size": 32},
    }
    config = RunConfig.model_validate(
        {
            "model": {"path": model, "dtype": "float32"},
            "rollout": {"sampling": {"max_tokens": 70, "ignore_eos": True}, "engine": tiny},
        }
    )
    engine = await start_engine(config, model, eos_token_ids=())
    try:
        careless = await preemptions(engine, Concurrency(MOST, MOST))
        careful = await preemptions(engine, Concurrency(1, MOST))
    finally:
        await engine.close()
    assert careless > GROUPS
    assert careful < 0.7 * careless


async def preemptions(engine: Engine, subject: Concurrency) -> int:
    """Answers all groups, with a look at the engine whenever some are done; how many requests it preempted."""
    before = (await engine.pressure()).preemptions
    begun, running = 0, set[asyncio.Task[Any]]()
    while running or begun < GROUPS:
        while begun < GROUPS and len(running) < subject.limit:
            begun += 1
            asking = engine.generate([3, 5, 7], samples=4, greedy=False, deadline_s=DEADLINE_S)
            running.add(asyncio.create_task(asking))
        _, running = await asyncio.wait(running, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        subject.observe(await engine.pressure(), groups=len(running))
    return (await engine.pressure()).preemptions - before
