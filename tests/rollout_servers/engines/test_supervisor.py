"""Restarts of a crashed engine: its requests, back-off, and the weights that are lost with it."""

import asyncio

import numpy as np
import pytest
from structlog.testing import capture_logs

from slipstream.buffer.wire.weights.protocol import Form
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines import supervisor
from slipstream.rollout_servers.engines.base import (
    NOTHING,
    Completion,
    DirectSource,
    DirectTransport,
    EngineError,
    Pressure,
    Request,
    RequestRefused,
    UpdateFailed,
)
from slipstream.rollout_servers.engines.supervisor import RestartingEngine, stitch
from tests.rollout_servers.engines.mortal import DEADLINE_S, NEVER_S, Engines, ask, install, manifest, span, until
from tests.rollout_servers.scripted import completion


@pytest.fixture
def engines() -> Engines:
    return Engines()


def cut(*token_ids: int) -> Completion:
    return completion([*token_ids], finish_reason="abort")


# --- requests --------------------------------------------------------------------------------------------


async def test_answers_continue_from_their_last_token(engines: Engines) -> None:
    engine = await engines.restarting()
    asking = ask(engine, samples=3)
    (await engines.busy(0)).crash(completion([7, 8]), cut(7, 9, 6), cut())
    begun, fresh = (await engines.busy(1, requests=2)).requests
    assert (begun.prompt_ids, begun.samples, begun.max_tokens) == ([3, 5, 7, 9, 6], 1, 5)
    assert (fresh.prompt_ids, fresh.samples, fresh.max_tokens) == ([3, 5], 1, 8)
    assert NEVER_S - DEADLINE_S < begun.deadline_s < NEVER_S
    begun.answer(4, 4, finish_reason="length")
    fresh.answer(2)

    kept, stitched, whole = await asking
    assert (kept, whole) == (completion([7, 8]), completion([2]))
    assert stitched == Completion([7, 9, 6, 4, 4], [-1.0, -2.0, -3.0, -1.0, -2.0], [span(0, 0, 5)], "length")
    assert (len(engines.started), engine.crashes, engine.requests_restarted) == (2, 1, 0)


def test_tokens_to_choose_from_are_stitched() -> None:
    one, two = (
        Completion([7], [-1.0], [span(0, 0, 1)], "abort", kept=[np.array(kept, dtype=np.int32)])
        for kept in ([7], [7, 9])
    )
    assert [each.tolist() for each in stitch(one, two).kept or ()] == [[7], [7, 9]]
    assert [each.tolist() for each in stitch(NOTHING, two).kept or ()] == [[7, 9]]
    assert stitch(NOTHING, NOTHING).kept is None


async def test_answer_continues_after_two_crashes(engines: Engines) -> None:
    asking = ask(await engines.restarting(), greedy=True, max_tokens=4)
    for number, token in enumerate([7, 8]):
        (await engines.busy(number)).crash(cut(token))
    (request,) = (await engines.busy(2)).requests
    assert (request.prompt_ids, request.greedy, request.max_tokens) == ([3, 5, 7, 8], True, 2)
    request.answer(9)
    assert [(*answer.token_ids,) for answer in await asking] == [(7, 8, 9)]


async def test_complete_answer_is_not_continued(engines: Engines) -> None:
    asking = ask(await engines.restarting(), max_tokens=2)
    (await engines.busy(0)).crash(cut(7, 8))
    assert await asking == [completion([7, 8], finish_reason="length")]


async def test_request_without_known_answers_is_restarted(engines: Engines) -> None:
    engine = await engines.restarting()
    asking = ask(engine, samples=2)
    (await engines.busy(0)).crash()
    (request,) = (await engines.busy(1)).requests
    assert (request.prompt_ids, request.samples, request.max_tokens) == ([3, 5], 2, None)
    request.answer(7)
    assert (len(await asking), engine.requests_restarted) == (2, 1)
    assert (engine.prompt_tokens, engine.cached_tokens) == (4, 0)


async def test_refused_request_is_no_crash(engines: Engines) -> None:
    engine = await engines.restarting()
    asking = ask(engine)
    (await engines.busy(0)).requests[0].answers.set_exception(RequestRefused("token 99"))
    with pytest.raises(RequestRefused, match="token 99"):
        await asking
    assert (engine.crashes, engine.ready) == (0, True)


async def test_refusal_after_a_crash_cancels_the_other_samples(engines: Engines) -> None:
    asking = ask(await engines.restarting(), samples=2)
    (await engines.busy(0)).crash(cut(7), cut(7))
    first, second = (await engines.busy(1, requests=2)).requests
    second.answers.set_exception(RequestRefused("token 99"))
    with pytest.raises(RequestRefused, match="token 99"):
        await asking
    await until(first.answers.cancelled)


@pytest.mark.parametrize("crashed", [False, True], ids=["running", "waiting-for-an-engine"])
async def test_cancelled_request_ends(engines: Engines, crashed: bool) -> None:
    engine = await engines.restarting()
    asking = ask(engine)
    (request,) = (await engines.busy(0)).requests
    if crashed:
        engines.may_start.clear()
        engines.started[0].crash()
        await until(lambda: not engine.ready)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (request.answers.cancelled(), engine.crashes) == (not crashed, int(crashed))


async def test_waiting_request_returns_its_answers_at_the_deadline(engines: Engines) -> None:
    engine = await engines.restarting()
    asking = ask(engine, samples=2, deadline_s=0.1)
    engines.may_start.clear()
    (await engines.busy(0)).crash(completion([7, 8]), cut(7))
    async with asyncio.timeout(DEADLINE_S):
        assert await asking == [completion([7, 8]), cut(7)]
        late = await engine.generate(Request([3], samples=2, deadline_s=0.01))
    assert [(*answer.token_ids, *answer.spans, answer.finish_reason) for answer in late] == [("abort",)] * 2


async def test_unusable_engine_gives_no_more_answers(engines: Engines) -> None:
    engine = await engines.restarting()
    asking = ask(engine)
    (request,) = (await engines.busy(0)).requests
    await engine.fail("the engine does not hold version 4")
    (again,) = (await engines.busy(1)).requests
    assert request.answers.cancelled()
    again.answer(7)
    assert await asking == [completion([7])]
    assert (engine.crashes, engine.requests_restarted) == (1, 1)


# --- restarts --------------------------------------------------------------------------------------------


async def test_crash_reported_by_many_requests_is_one_crash(engines: Engines) -> None:
    engine = await engines.restarting()
    asking = [ask(engine) for _ in range(5)]
    with capture_logs() as logs:
        (await engines.busy(0, requests=5)).crash()
        second = await engines.busy(1, requests=5)
    (crash,) = [entry for entry in logs if entry["event"] == "engine crashed"]
    assert (crash["log_level"], crash["reason"], crash["requests"]) == ("warning", "out of memory", 5)
    for request in second.requests:
        request.answer(7)
    await asyncio.gather(*asking)
    assert (len(engines.started), engine.crashes, engine.requests_restarted) == (2, 1, 5)
    assert engines.started[0].asked == ["close"]


async def test_incarnation_is_new_after_each_start_and_empty_between(engines: Engines) -> None:
    engine = await engines.restarting()
    first = engine.incarnation
    engines.may_start.clear()
    await engine.fail("wrong weights")
    assert engine.incarnation == ""
    engines.may_start.set()
    await until(lambda: engine.ready)
    assert engine.incarnation not in (first, "")


async def test_back_off_doubles_up_to_its_maximum(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_S", 0.003)
    engine = await engines.restarting(give_up_after=10)
    engines.failures += [EngineError("no GPU")] * 3
    with capture_logs() as logs:
        await engine.fail("wrong weights")
        await until(lambda: engine.ready)
    crashes = [(entry["reason"], entry["restart_in_s"]) for entry in logs if entry["event"] == "engine crashed"]
    assert crashes == [("wrong weights", 0.001), ("no GPU", 0.002), ("no GPU", 0.003), ("no GPU", 0.003)]
    assert (engine.crashes, len(engines.started)) == (4, 2)


@pytest.mark.parametrize(
    ("give_up_after", "reasons"), [(3, ["out of memory", "bus error", "out of memory"]), (0, ["bus error"])]
)
async def test_too_many_crashes_in_a_row_are_final(engines: Engines, give_up_after: int, reasons: list[str]) -> None:
    engine = await engines.restarting(give_up_after=give_up_after)
    asking = ask(engine)
    for number, reason in enumerate(reasons):
        (await engines.busy(number)).crash(reason=reason)
    for call in (asking, engine.pressure(), engine.score([3, 5]), install(engine, 4)):
        with pytest.raises(EngineError, match=rf"give_up_after={give_up_after}: {'; '.join(dict.fromkeys(reasons))}$"):
            await call
    assert len(engines.started) == len(reasons)


@pytest.mark.parametrize(("finish_reason", "final"), [("stop", False), ("abort", True)])
async def test_finished_answer_ends_a_row_of_crashes(engines: Engines, finish_reason: str, final: bool) -> None:
    engine = await engines.restarting(give_up_after=2)
    for number in range(2):
        answered, crashing = ask(engine), ask(engine)
        (await engines.busy(number, requests=2)).requests[0].answer(7, finish_reason=finish_reason)
        await answered
        engines.started[number].crash()
        if number == 1 and final:
            with pytest.raises(EngineError, match="give_up_after=2"):
                await crashing
            return
        await engines.busy(number + 1)
        crashing.cancel()
        await until(crashing.done)
        engines.started[-1].requests.clear()
    assert (engine.crashes, engine.ready) == (2, True)


async def test_config_error_of_a_restart_is_final(engines: Engines) -> None:
    engine = await engines.restarting()
    engines.failures.append(ConfigError("model.path"))
    await engine.fail("wrong weights")
    with pytest.raises(ConfigError, match=r"model\.path"):
        await ask(engine)


async def test_engine_that_fails_to_close_is_restarted(engines: Engines) -> None:
    engine = await engines.restarting()
    engines.started[0].failure = EngineError("bus error")
    assert await engine.pressure() == Pressure(kv_cache_usage=0.0, preemptions=0), "of the second one"
    assert (len(engines.started), engine.crashes) == (2, 1)


async def test_last_pressure_is_returned_when_the_engine_refuses(engines: Engines) -> None:
    engine = await engines.restarting()
    (first,) = engines.started
    first.usage = Pressure(kv_cache_usage=0.5, preemptions=3)
    assert await engine.pressure() == first.usage
    first.failure = RequestRefused("500")
    assert await engine.pressure() == first.usage
    assert (engine.ready, engine.crashes) == (True, 0)


@pytest.mark.parametrize("restarted", [False, True], ids=["restarting", "restarted"])
async def test_closing_closes_every_engine_once_and_fails_requests(engines: Engines, restarted: bool) -> None:
    engine = await engines.restarting()
    engines.may_start.clear()
    await engine.fail("wrong weights")
    await until(lambda: engines.started[0].asked == ["close"])
    asking = ask(engine)
    if restarted:
        engines.may_start.set()
        await engines.busy(1)
        engines.started[1].requests[0].answer(7)
        await asking
    async with asyncio.timeout(DEADLINE_S):
        await engine.close()
        if not restarted:
            with pytest.raises(EngineError, match="closed"):
                await asking
    assert [each.asked for each in engines.started] == [["close"]] * (1 + restarted)


# --- weights ---------------------------------------------------------------------------------------------


async def restarted(engines: Engines) -> RestartingEngine:
    """The second engine, which waits for weights: the first had version 3."""
    engine = await engines.restarting(version=3)
    await engine.fail("wrong weights")
    await until(lambda: len(engines.started) == 2)
    return engine


async def test_requests_wait_for_weights_of_the_next_engine(engines: Engines) -> None:
    engine = await engines.restarting(version=3)
    begun, fresh = ask(engine), ask(engine)
    (await engines.busy(0, requests=2)).crash(completion([7], finish_reason="abort", version=3))
    await until(lambda: len(engines.started) == 2)
    assert (engine.version, engine.ready, engines.started[1].requests) == (0, False, [])

    assert await install(engine, 4) == 0.25
    assert (engine.version, engine.ready) == (4, True)
    for request in await engines.started[1].received(2):
        request.answer(8, 9, version=4)
    assert [(await asking)[0].spans for asking in (begun, fresh)] == [[span(3, 0, 1), span(4, 1, 3)]] * 2


async def test_crash_before_weights_does_not_end_the_wait_for_them(engines: Engines) -> None:
    engine = await restarted(engines)
    engines.started[1].failure = EngineError("bus error")
    with pytest.raises(UpdateFailed, match="bus error"):
        await install(engine, 4)
    await until(lambda: len(engines.started) == 3)
    assert not engine.ready
    await install(engine, 4)
    assert engine.ready


@pytest.mark.parametrize("call", ["install", "score", "checksums"])
async def test_crash_in_an_update_is_a_failed_update(engines: Engines, call: str) -> None:
    engine = await engines.restarting()
    engines.may_start.clear()
    engines.started[0].failure = EngineError("bus error")
    calls = {
        "install": lambda: install(engine, 4),
        "score": lambda: engine.score([3, 5]),
        "checksums": engine.checksums,
    }
    with pytest.raises(UpdateFailed, match="bus error"):
        await calls[call]()
    with pytest.raises(UpdateFailed):  # not restarted yet
        await calls[call]()
    engines.may_start.set()
    await until(lambda: engine.ready)
    assert (engine.crashes, engine.version) == (1, 0)


async def test_failed_update_is_no_crash(engines: Engines) -> None:
    engine = await engines.restarting()
    engines.started[0].failure = UpdateFailed("no such tensor")
    with pytest.raises(UpdateFailed, match="no such tensor"):
        await install(engine, 4)
    assert (engine.crashes, engine.ready) == (0, True)


async def test_direct_version_makes_restarted_engine_ready(engines: Engines) -> None:
    engine = await restarted(engines)
    form = Form(transfer=1, epoch=1, transport="nccl", host="127.0.0.1", port=1, rank=1, world=3, deadline_s=1.0)
    inner, version, source = engines.started[1], manifest(4), DirectSource("nccl")
    inner.direct = DirectTransport("nccl", workers=2)
    assert (engine.direct, engine.ready) == (inner.direct, False)
    await engine.join(form)
    installing = asyncio.create_task(engine.install(4, version, source))
    await source.received.wait()
    assert (engine.version, engine.ready) == (0, False)
    source.approved.set()
    assert await installing == 0.25
    assert (engine.version, engine.ready, inner.asked) == (4, True, [form, version])


async def test_direct_version_fails_when_engine_crashes_meanwhile(engines: Engines) -> None:
    engine, source = await engines.restarting(), DirectSource("nccl")
    installing = asyncio.create_task(engine.install(4, manifest(4), source))
    await source.received.wait()
    await engine.fail("wrong weights")
    await until(lambda: len(engines.started) == 2)
    source.approved.set()
    with pytest.raises(UpdateFailed):
        await installing
    assert (engine.version, engines.started[1].asked) == (0, [])
