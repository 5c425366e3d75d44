"""An engine that outlives its deaths, and the weights that are lost with it."""

import asyncio

import pytest

from slipstream.buffer.wire.weights.protocol import Form
from slipstream.rollout_servers.engines.base import DirectSource, DirectTransport, EngineError, UpdateFailed
from tests.rollout_servers.engines.mortal import MANIFEST, Engines, ask, install, span, until
from tests.rollout_servers.scripted import completion


async def test_after_the_death_of_an_engine_with_new_weights_requests_wait_until_the_next_one_has_some() -> None:
    engines = Engines()
    engine = await engines.begin(version=3)
    begun, fresh = ask(engine), ask(engine)
    await engines.lives[0].is_asked(2)
    engines.lives[0].dies(completion([7], finish_reason="abort", version=3))
    await until(lambda: len(engines.lives) == 2)
    assert (engine.version, engine.ready, engines.lives[1].requests) == (0, False, [])

    assert await install(engine, 4) == 0.25
    assert (engine.version, engine.ready) == (4, True)
    for request in await engines.lives[1].is_asked(2):
        request.answers.set_result([completion([8, 9], version=4)])
    assert [(await asking)[0].spans for asking in (begun, fresh)] == [[span(3, 0, 1), span(4, 1, 3)]] * 2


async def test_an_engine_that_dies_before_it_has_weights_does_not_make_its_successor_answer_without() -> None:
    engines = Engines()
    engine = await engines.begin(version=3)
    await engine.fail("wrong weights")
    await until(lambda: len(engines.lives) == 2)
    engines.lives[1].failure = EngineError("bus error")
    with pytest.raises(UpdateFailed, match="bus error"):
        await install(engine, 4)
    await until(lambda: len(engines.lives) == 3)
    assert not engine.ready
    await install(engine, 4)
    assert engine.ready


async def test_an_update_that_kills_the_engine_is_an_update_that_failed() -> None:
    engines = Engines()
    engine = await engines.begin()
    engines.may_start.clear()
    engines.lives[0].failure = EngineError("half of version 4")
    with pytest.raises(UpdateFailed, match="half of version 4"):
        await install(engine, 4)
    with pytest.raises(UpdateFailed, match="not restarted yet"):
        await install(engine, 4)
    engines.may_start.set()
    await until(lambda: engine.ready)
    assert (engine.crashes, engine.version) == (1, 0)


@pytest.mark.parametrize("call", ["score", "checksums"])
async def test_an_engine_that_dies_while_it_is_verified_is_started_again(call: str) -> None:
    engines = Engines()
    engine = await engines.begin()
    engines.lives[0].failure = EngineError("bus error")
    with pytest.raises(UpdateFailed, match="bus error"):
        await (engine.score([3, 5]) if call == "score" else engine.checksums())
    await until(lambda: engine.ready)
    assert engine.crashes == 1


async def test_an_update_that_failed_leaves_the_engine_alive() -> None:
    engines = Engines()
    engine = await engines.begin()
    engines.lives[0].failure = UpdateFailed("no such tensor")
    with pytest.raises(UpdateFailed, match="no such tensor"):
        await install(engine, 4)
    assert (engine.crashes, engine.ready) == (0, True)


FORM = Form(transfer=1, epoch=1, transport="nccl", host="127.0.0.1", port=1, rank=1, world=3, deadline_s=1.0)


async def test_direct_version_makes_restarted_engine_ready() -> None:
    engines = Engines()
    engine = await engines.begin(version=3)
    await engine.fail("wrong weights")
    await until(lambda: len(engines.lives) == 2)
    inner = engines.lives[1]
    inner.direct = DirectTransport("nccl", workers=2)
    assert (engine.direct, engine.ready) == (inner.direct, False)
    await engine.join(FORM)
    source = DirectSource("nccl")
    installing = asyncio.create_task(engine.install(4, MANIFEST, source))
    await source.received.wait()
    assert (engine.version, engine.ready) == (0, False)
    source.approved.set()
    assert await installing == 0.25
    assert (engine.version, engine.ready, inner.asked) == (4, True, [FORM, MANIFEST])


async def test_direct_version_fails_when_engine_crashes_meanwhile() -> None:
    engines = Engines()
    engine = await engines.begin()
    source = DirectSource("nccl")
    installing = asyncio.create_task(engine.install(4, MANIFEST, source))
    await source.received.wait()
    await engine.fail("wrong weights")
    await until(lambda: len(engines.lives) == 2)
    source.approved.set()
    with pytest.raises(UpdateFailed):
        await installing
    assert (engine.version, engines.lives[1].asked) == (0, [])
