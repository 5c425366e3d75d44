"""An engine that outlives its deaths: its requests, and how often it is started again."""

import asyncio

import pytest
from structlog.testing import capture_logs

from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines import supervisor
from slipstream.rollout_servers.engines.base import Completion, EngineError, Pressure, Request, RequestRefused
from slipstream.rollout_servers.engines.supervisor import stitch
from tests.rollout_servers.engines.mortal import DEADLINE_S, NEVER_S, Engines, ask, install, span, until
from tests.rollout_servers.scripted import completion

# --- requests --------------------------------------------------------------------------------------------


async def test_each_answer_goes_on_from_its_last_token_in_the_next_engine() -> None:
    engines = Engines()
    engine = await engines.begin()
    asking = ask(engine, samples=3, greedy=True)
    await engines.lives[0].is_asked()
    engines.lives[0].dies(
        completion([7, 8]), completion([7, 9, 6], finish_reason="abort"), completion([], finish_reason="abort")
    )
    second = await engines.life(1)
    begun, fresh = await second.is_asked(2)
    assert (begun.prompt_ids, begun.samples, begun.greedy, begun.max_tokens) == ([3, 5, 7, 9, 6], 1, True, 5)
    assert (fresh.prompt_ids, fresh.samples, fresh.greedy, fresh.max_tokens) == ([3, 5], 1, True, 8)
    assert NEVER_S - DEADLINE_S < begun.deadline_s < NEVER_S
    begun.answers.set_result([completion([4, 4], finish_reason="length")])
    fresh.answers.set_result([completion([2])])

    kept, stitched, whole = await asking
    assert (kept, whole) == (completion([7, 8]), completion([2]))
    assert stitched == Completion([7, 9, 6, 4, 4], [-1.0, -2.0, -3.0, -1.0, -2.0], [span(0, 0, 5)], "length")
    assert (len(engines.lives), engine.crashes, engine.requests_restarted) == (2, 1, 0)


async def test_an_answer_is_stitched_over_more_than_one_death() -> None:
    engines = Engines()
    asking = ask(await engines.begin(), max_tokens=4)
    for number, token in enumerate([7, 8]):
        (await engines.life(number)).dies(completion([token], finish_reason="abort"))
    third = await engines.life(2)
    assert (third.requests[0].prompt_ids, third.requests[0].max_tokens) == ([3, 5, 7, 8], 2)
    third.requests[0].answers.set_result([completion([9])])
    assert [(*answer.token_ids,) for answer in await asking] == [(7, 8, 9)]


def test_a_stitched_answer_keeps_the_old_spans_and_shifts_the_new_ones() -> None:
    begun = Completion([1, 2, 3], [-1.0] * 3, [span(2, 0, 1), span(3, 1, 3)], "abort")
    rest = Completion([4, 5, 6], [-2.0] * 3, [span(3, 0, 1), span(4, 1, 3)], "stop")
    assert stitch(begun, rest).spans == [span(2, 0, 1), span(3, 1, 4), span(4, 4, 6)]


async def test_an_answer_that_had_all_its_tokens_is_not_asked_for_more() -> None:
    engines = Engines()
    asking = ask(await engines.begin(), max_tokens=2)
    (await engines.life(0)).dies(completion([7, 8], finish_reason="abort"))
    assert await asking == [completion([7, 8], finish_reason="length")]


async def test_a_request_of_which_nothing_is_known_begins_again_and_is_counted() -> None:
    engines = Engines()
    engine = await engines.begin()
    asking = ask(engine, samples=2)
    (await engines.life(0)).dies()
    second = await engines.life(1)
    request = second.requests[0]
    assert (request.prompt_ids, request.samples, request.max_tokens) == ([3, 5], 2, None)
    request.answers.set_result([completion([7])] * 2)
    assert len(await asking) == 2
    assert engine.requests_restarted == 1


async def test_a_request_that_is_refused_costs_no_engine() -> None:
    engines = Engines()
    engine = await engines.begin()
    asking = ask(engine)
    (await engines.life(0)).requests[0].answers.set_exception(RequestRefused("token 99 is not in the vocabulary"))
    with pytest.raises(RequestRefused, match="token 99"):
        await asking
    assert (engine.crashes, engine.ready) == (0, True)


async def test_what_is_refused_after_a_death_is_refused_in_the_refusals_words() -> None:
    engines = Engines()
    asking = ask(await engines.begin(), samples=2)
    (await engines.life(0)).dies(*[completion([7], finish_reason="abort")] * 2)
    second = await engines.life(1)
    (await second.is_asked(2))[1].answers.set_exception(RequestRefused("too long"))
    with pytest.raises(RequestRefused, match="too long"):
        await asking
    await until(second.requests[0].answers.cancelled)


async def test_cancelling_a_request_cancels_it_in_the_engine_and_kills_nobody() -> None:
    engines = Engines()
    engine = await engines.begin()
    asking = ask(engine)
    request = (await engines.life(0)).requests[0]
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert request.answers.cancelled()
    assert (engine.crashes, engine.ready) == (0, True)


async def test_cancelling_a_request_that_waits_for_the_next_engine_ends_it() -> None:
    engines = Engines()
    asking = ask(await engines.begin())
    engines.may_start.clear()
    (await engines.life(0)).dies()
    await until(lambda: not asking.done())
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_at_its_deadline_a_request_that_waits_has_what_it_had_when_its_engine_died() -> None:
    engines = Engines()
    engine = await engines.begin()
    asking = ask(engine, samples=2, deadline_s=0.1)
    engines.may_start.clear()
    (await engines.life(0)).dies(completion([7, 8]), completion([7], finish_reason="abort"))
    async with asyncio.timeout(DEADLINE_S):
        assert await asking == [completion([7, 8]), completion([7], finish_reason="abort")]
        late = await engine.generate(Request([3], samples=2, deadline_s=0.01))
    assert [(*answer.token_ids, *answer.spans, answer.finish_reason) for answer in late] == [("abort",)] * 2


# --- lives -----------------------------------------------------------------------------------------------


async def test_a_death_of_which_many_hear_is_one_death() -> None:
    engines = Engines()
    engine = await engines.begin()
    asking = [ask(engine) for _ in range(5)]
    await engines.lives[0].is_asked(5)
    with capture_logs() as logs:
        engines.lives[0].dies()
        second = await engines.life(1)
    (death,) = [entry for entry in logs if entry["event"] == "engine crashed"]
    assert (death["log_level"], death["reason"], death["requests"]) == ("warning", "out of memory", 5)
    for request in await second.is_asked(5):
        request.answers.set_result([completion([7])])
    await asyncio.gather(*asking)
    assert (len(engines.lives), engine.crashes, engine.requests_restarted) == (2, 1, 5)
    assert engines.lives[0].asked == ["close"]


async def test_an_engine_has_another_incarnation_as_soon_as_it_is_started_and_none_while_it_is_dead() -> None:
    engines = Engines()
    engine = await engines.begin()
    first = engine.incarnation
    engines.may_start.clear()
    asking = ask(engine)
    (await engines.life(0)).dies()
    await until(lambda: not engine.ready)
    assert engine.incarnation == ""
    engines.may_start.set()
    await until(lambda: engine.ready)
    assert engine.incarnation not in (first, "")
    asking.cancel()


async def test_pauses_double_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(failures=[])
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_S", 0.003)
    engine = await engines.begin(give_up_after=10)
    engines.failures += [EngineError("no GPU")] * 3
    with capture_logs() as logs:
        await engine.fail("wrong weights")
        await until(lambda: engine.ready)
    deaths = [(entry["reason"], entry["restart_in_s"]) for entry in logs if entry["event"] == "engine crashed"]
    assert deaths == [("wrong weights", 0.001), ("no GPU", 0.002), ("no GPU", 0.003), ("no GPU", 0.003)]
    assert (engine.crashes, len(engines.lives)) == (4, 2)


async def test_too_many_deaths_in_a_row_are_the_end_and_its_message_names_them() -> None:
    engines = Engines()
    engine = await engines.begin(give_up_after=3)
    asking = ask(engine)
    for number, reason in enumerate(["out of memory", "bus error", "out of memory"]):
        (await engines.life(number)).dies(reason=reason)
    with pytest.raises(EngineError, match=r"crashed 3 times in a row.*give_up_after=3: out of memory; bus error$"):
        await asking
    for call in (engine.pressure, lambda: engine.score([3, 5]), lambda: install(engine, 4)):
        with pytest.raises(EngineError, match="3 times in a row"):
            await call()
    assert len(engines.lives) == 3


async def test_with_no_patience_the_first_death_is_the_end() -> None:
    engines = Engines()
    asking = ask(await engines.begin(give_up_after=0))
    (await engines.life(0)).dies(reason="bus error")
    with pytest.raises(EngineError, match="bus error"):
        await asking
    assert len(engines.lives) == 1


async def test_deaths_with_an_answer_between_them_are_not_in_a_row() -> None:
    engines = Engines()
    engine = await engines.begin(give_up_after=2)
    for number in range(4):
        answered, dying = ask(engine), ask(engine)
        first, _ = await (await engines.life(number)).is_asked(2)
        first.answers.set_result([completion([7])])
        await answered
        engines.lives[number].dies()
        await until(lambda number=number: len(engines.lives) == number + 2)  # type: ignore[misc]
        dying.cancel()
        await until(dying.done)
        engines.lives[-1].requests.clear()
    assert (engine.crashes, engine.ready) == (4, True)


async def test_an_answer_that_was_cut_short_does_not_end_a_row_of_deaths() -> None:
    engines = Engines()
    engine = await engines.begin(give_up_after=2)
    for number in range(2):
        late, dying = ask(engine), ask(engine)
        first, _ = await (await engines.life(number)).is_asked(2)
        first.answers.set_result([completion([7], finish_reason="abort")])
        assert [answer.finish_reason for answer in await late] == ["abort"]
        engines.lives[number].dies()
        if number == 0:
            await until(lambda: len(engines.lives) == 2)
            dying.cancel()
            await until(dying.done)
            engines.lives[-1].requests.clear()
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineError, match="crashed 2 times in a row"):
            await dying


async def test_what_is_no_death_ends_the_restarts_as_it_is() -> None:
    engines = Engines()
    engine = await engines.begin()
    engines.failures.append(ConfigError("model.path holds no config.json"))
    asking = ask(engine)
    (await engines.life(0)).dies()
    with pytest.raises(ConfigError, match="holds no config"):
        await asking


async def test_an_engine_that_can_not_be_closed_is_followed_by_another() -> None:
    engines = Engines()
    engine = await engines.begin()
    engines.lives[0].failure = EngineError("already dead")
    assert await engine.pressure() == Pressure(kv_cache_usage=0.0, preemptions=0), "of the second one"
    assert (len(engines.lives), engine.crashes) == (2, 1)


async def test_an_engine_that_lives_and_can_not_tell_its_pressure_is_kept_and_taken_to_be_as_it_was() -> None:
    engines = Engines()
    engine = await engines.begin()
    (life,) = engines.lives
    life.usage = Pressure(kv_cache_usage=0.5, preemptions=3)
    assert await engine.pressure() == life.usage
    life.failure = RequestRefused("the server answered /metrics with 500")
    assert await engine.pressure() == life.usage
    assert (engine.ready, engine.crashes) == (True, 0)


async def test_closing_ends_a_restart_and_whoever_waits_for_it() -> None:
    engines = Engines()
    engine = await engines.begin()
    engines.may_start.clear()
    asking = ask(engine)
    (await engines.life(0)).dies()
    await until(lambda: engines.lives[0].asked == ["close"])
    async with asyncio.timeout(DEADLINE_S):
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await asking
    engines.may_start.set()
    assert (len(engines.lives), engines.lives[0].asked) == (1, ["close"])


async def test_closing_closes_the_engine_that_lives() -> None:
    engines = Engines()
    engine = await engines.begin()
    await engine.fail("wrong weights")
    await until(lambda: engine.ready)
    await engine.close()
    assert [life.asked for life in engines.lives] == [["close"], ["close"]]


async def test_an_engine_that_is_declared_unusable_answers_nobody_any_more() -> None:
    engines = Engines()
    engine = await engines.begin()
    asking = ask(engine)
    request = (await engines.life(0)).requests[0]
    await engine.fail("the engine does not hold version 4")
    second = await engines.life(1)
    assert request.answers.cancelled()
    second.requests[0].answers.set_result([completion([7])])
    assert await asking == [completion([7])]
    assert (engine.crashes, engine.requests_restarted) == (1, 1)
