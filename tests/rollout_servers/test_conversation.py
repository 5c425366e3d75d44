"""What a rollout server says to the buffer: who it is, how much it takes on, and what it has not heard an answer to."""

import asyncio

import pytest
import structlog

from slipstream.buffer.wire import messages as m
from slipstream.rollout_servers import server
from slipstream.rollout_servers import tickets as setbacks
from slipstream.rollout_servers.engines.base import EngineError, Pressure, RequestRefused
from slipstream.rollout_servers.weights import follower as member
from tests.rollout_servers.line import NEVER_S, MakeLine, ticket

RESEND_S = 0.2


async def test_a_server_says_hello_first_and_how_it_does_only_once_it_is_welcome(make_line: MakeLine) -> None:
    async with make_line().buffer() as buffer:
        hellos = [(await buffer.next())[0] for _ in range(3)]  # unanswered, it is repeated
        assert all(isinstance(hello, m.ServerHello) for hello in hellos)
        assert len({hello.incarnation for hello in hellos}) == 1
        await buffer.says(m.Welcome(version=0))
        credits = await buffer.hears(m.Credits)
        assert (credits.capacity, credits.held) == (8, [])
        assert isinstance((await buffer.next())[0], m.Credits), "a welcome server does not say hello again"


async def test_a_server_whom_nobody_answers_says_for_whom_it_waits(
    make_line: MakeLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.configs.runtime.logging.WAIT_LOG_AFTER_S", 0.0)
    monkeypatch.setattr(member, "LEARNER_MS", 10)
    with structlog.testing.capture_logs() as said:
        async with make_line().buffer() as buffer:
            for _ in range(2):
                await buffer.next()
    waiting = {line["event"]: line["address"] for line in said if line["event"].startswith("waiting")}
    assert waiting.keys() == {"waiting for the buffer", "waiting for the learner"}
    assert all(address.startswith("tcp://127.0.0.1:") for address in waiting.values())


async def test_a_buffer_that_does_not_know_the_server_hears_one_hello_of_the_same_incarnation(
    make_line: MakeLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEARTBEAT_S", NEVER_S)
    async with make_line().buffer() as buffer:
        first = await buffer.welcomes()
        await buffer.hears(m.Credits)
        await buffer.says(m.WhoAreYou(), m.WhoAreYou())
        again, _ = await buffer.next()
        assert again == first
        await buffer.says(m.Welcome(version=0))
        assert isinstance((await buffer.next())[0], m.Credits)


async def test_a_buffer_that_is_away_or_silent_is_greeted_less_and_less_often(
    make_line: MakeLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = make_line()
    monkeypatch.setattr(server, "HEARTBEAT_S", 0.002)
    monkeypatch.setattr(server, "HELLO_SHARE", 0.2)
    await asyncio.wait([line.running], timeout=0.4)
    async with line.buffer() as buffer:
        await buffer.welcomes()
        hellos = 0
        while isinstance((await buffer.next())[0], m.ServerHello):
            hellos += 1
        assert hellos < 60, "one every 2 ms would be 200"
        monkeypatch.setattr(server, "SILENCE_S", 0.05)
        await buffer.hears(m.ServerHello)


async def test_every_start_of_a_server_is_an_incarnation_of_its_own(make_line: MakeLine) -> None:
    hellos = [make_line().server._hello, make_line().server._hello]
    assert hellos[0].incarnation != hellos[1].incarnation


async def test_where_nothing_works_the_word_that_a_ticket_failed_is_held_back_and_its_credit_with_it(
    make_line: MakeLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setbacks, "USUAL", 1)
    monkeypatch.setattr(setbacks, "FIRST_S", NEVER_S)
    monkeypatch.setattr(setbacks, "MOST_S", NEVER_S)
    line = make_line()
    line.engine.failure = RequestRefused("no")
    async with line.buffer() as buffer:
        await buffer.welcomes()
        await buffer.says(m.Tickets(tickets=[ticket("1")]))
        assert (await buffer.hears(m.GroupFailed)).id == "1"
        await buffer.says(m.Acknowledge(outcomes={"1": "filtered"}), m.Tickets(tickets=[ticket("2")]))
        since_then: list[m.Credits] = []
        while line.engine.questions < 2 or len(since_then) < 3:
            message, _ = await buffer.next()
            assert isinstance(message, m.Credits)
            since_then += [message] if line.engine.questions == 2 else []
        assert message.held == ["2"]
        assert since_then[-2].status.busy_s == since_then[-1].status.busy_s, "to wait is no work"


async def test_where_something_works_again_no_failure_is_held_back_any_more(
    make_line: MakeLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setbacks, "USUAL", 1)
    monkeypatch.setattr(setbacks, "FIRST_S", NEVER_S)
    monkeypatch.setattr(setbacks, "MOST_S", NEVER_S)
    line = make_line()
    line.engine.failure = RequestRefused("no")
    async with line.buffer() as buffer:
        await buffer.welcomes()
        await buffer.says(m.Tickets(tickets=[ticket("1"), ticket("2")]))
        assert (await buffer.hears(m.GroupFailed)).id == "1"
        await buffer.hears(m.Credits, lambda credits: line.engine.questions == 2)
        line.engine.failure = None
        await buffer.says(m.Tickets(tickets=[ticket("3")]))
        assert (await buffer.hears(m.GroupFailed)).id == "2"


async def test_a_server_that_is_stopped_says_goodbye_after_all_that_it_had_sent(make_line: MakeLine) -> None:
    line = make_line()
    async with line.buffer() as buffer:
        hello = await buffer.welcomes()
        await buffer.says(m.Tickets(tickets=[ticket("1")]))
        line.engine.may_answer.set()
        await buffer.hears(m.Deliver)
        line.running.cancel()
        assert await buffer.hears(m.ServerGoodbye) == m.ServerGoodbye(incarnation=hello.incarnation)


async def test_a_silent_buffer_is_asked_whether_it_is_there_and_then_gets_what_it_has_not_acknowledged(
    make_line: MakeLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "RESEND_S", RESEND_S)
    async with make_line().buffer() as buffer:
        first = await buffer.welcomes()
        await buffer.says(m.Tickets(tickets=[ticket("a")]))
        await buffer.hears(m.Deliver)
        for _ in range(2):  # as long as it says nothing, it gets no copies
            message, groups = await buffer.next()
            while isinstance(message, m.Credits):
                message, groups = await buffer.next()
            assert (message, groups) == (first, [])
        await buffer.says(m.Welcome(version=0))
        delivered, _ = await buffer.hears(m.Deliver)
        assert delivered.ids == ["a"]


async def test_every_group_is_sent_again_to_a_returning_buffer(
    make_line: MakeLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "RESEND_S", RESEND_S)
    line = make_line()
    line.engine.may_answer.clear()
    names = [f"ticket-{number}" for number in range(8)]
    async with line.buffer() as buffer:
        await buffer.welcomes()
        await buffer.says(m.Tickets(tickets=[ticket(name) for name in names]))
        await buffer.hears(m.Credits, lambda credits: credits.held == names)
    line.engine.may_answer.set()
    async with line.buffer() as buffer:
        came, done = set[str](), False
        while not done:
            message, _ = await buffer.next()
            match message:
                case m.ServerHello():
                    await buffer.says(m.Welcome(version=0))
                case m.Credits():
                    done = not message.held
                    await buffer.says(m.WhoAreYou())
                case m.Deliver():
                    came |= set(message.ids)
                    await buffer.says(m.Acknowledge(outcomes=dict.fromkeys(message.ids, "ready")))
        assert came == set(names)


async def test_under_pressure_a_server_asks_for_fewer_groups_and_for_all_of_them_again_afterwards(
    make_line: MakeLine,
) -> None:
    line = make_line()
    async with line.buffer() as buffer:
        await buffer.welcomes()
        line.engine.usage = Pressure(kv_cache_usage=1.0, preemptions=0)
        await buffer.hears(m.Credits, lambda credits: credits.capacity == 1)
        line.engine.usage = Pressure(kv_cache_usage=0.5, preemptions=0)
        await buffer.hears(m.Credits, lambda credits: credits.capacity == 8)


async def test_a_server_says_at_once_that_it_takes_on_fewer_groups(
    make_line: MakeLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEARTBEAT_S", NEVER_S)
    monkeypatch.setattr(server, "PRESSURE_INTERVAL_S", 0.5)
    line = make_line()
    async with line.buffer() as buffer:
        await buffer.welcomes()
        line.engine.usage = Pressure(kv_cache_usage=1.0, preemptions=0)
        await buffer.hears(m.Credits, lambda credits: credits.capacity == 4)


async def test_a_server_whose_engine_died_takes_on_nothing_until_it_has_another_and_then_answers_all(
    make_line: MakeLine,
) -> None:
    line = make_line()
    line.engine.may_answer.clear()
    async with line.buffer() as buffer:
        await buffer.welcomes()
        await buffer.says(m.Tickets(tickets=[ticket("a")]))
        await buffer.hears(m.Credits, lambda credits: credits.held == ["a"])
        line.engine.failure = EngineError("out of memory")
        line.engine.may_answer.set()
        credits = await buffer.hears(m.Credits, lambda credits: credits.capacity == 0)
        assert credits.held == ["a"]
        line.may_restart.set()
        (delivered, _) = await buffer.hears(m.Deliver)
        assert delivered.ids == ["a"]
        credits = await buffer.hears(m.Credits, lambda credits: credits.capacity == 8)
        assert (credits.status.engine_deaths, credits.status.requests_restarted) == (1, 1)
