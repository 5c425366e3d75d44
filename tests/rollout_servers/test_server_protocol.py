"""Messages between a rollout server and the buffer: joining, heartbeats, credits, resends."""

import asyncio

import pytest
import structlog

from slipstream.buffer.wire import messages as m
from slipstream.rollout_servers import server, tickets
from slipstream.rollout_servers.engines.base import EngineError, Pressure, RequestRefused
from slipstream.rollout_servers.weights import follower
from tests.rollout_servers.fake_buffer import NEVER_S, StartServer, ticket

RESEND_S = 0.2


async def test_hellos_until_welcome_then_credits(start_server: StartServer) -> None:
    async with start_server().buffer(welcome=False) as buffer:
        hellos = [(await buffer.next())[0] for _ in range(3)]  # unanswered, it is repeated
        assert all(isinstance(hello, m.ServerHello) for hello in hellos)
        assert len({hello.incarnation for hello in hellos}) == 1
        await buffer.send(m.Welcome(version=0))
        credits = await buffer.receive(m.Credits)
        assert (credits.capacity, credits.held) == (8, [])
        assert isinstance((await buffer.next())[0], m.Credits), "a joined server sends no hello"


async def test_absent_peers_are_logged_with_their_address(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.configs.runtime.logging.WAIT_LOG_AFTER_S", 0.0)
    monkeypatch.setattr(follower, "LEARNER_MS", 10)
    with structlog.testing.capture_logs() as logs:
        async with start_server().buffer(welcome=False) as buffer:
            for _ in range(2):
                await buffer.next()
    waiting = {line["event"]: line["address"] for line in logs if line["event"].startswith("waiting")}
    assert waiting.keys() == {"waiting for the buffer", "waiting for the learner"}
    assert all(address.startswith("tcp://127.0.0.1:") for address in waiting.values())


async def test_an_unknown_server_repeats_its_hello_once(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEARTBEAT_S", NEVER_S)
    async with start_server().buffer(welcome=False) as buffer:
        first = await buffer.welcome()
        await buffer.receive(m.Credits)
        await buffer.send(m.UnknownPeer(), m.UnknownPeer())
        assert (await buffer.next())[0] == first
        await buffer.send(m.Welcome(version=0))
        assert isinstance((await buffer.next())[0], m.Credits)


async def test_hellos_to_an_absent_or_silent_buffer_get_rarer(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start_server()
    monkeypatch.setattr(server, "HEARTBEAT_S", 0.002)
    monkeypatch.setattr(server, "HELLO_SHARE", 0.2)
    await asyncio.wait([running.task], timeout=0.4)
    async with running.buffer() as buffer:
        hellos = 0
        while isinstance((await buffer.next())[0], m.ServerHello):
            hellos += 1
        assert hellos < 60, "one every 2 ms would be 200"
        monkeypatch.setattr(server, "SILENCE_S", 0.05)
        await buffer.receive(m.ServerHello)


async def test_a_delayed_failure_keeps_its_credit_until_a_success(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tickets, "FREE_FAILURES", 1)
    for delay in ("FIRST_DELAY_S", "LONGEST_DELAY_S"):
        monkeypatch.setattr(tickets, delay, NEVER_S)
    failing = start_server()
    failing.engine.failure = RequestRefused("no")
    async with failing.buffer() as buffer:
        await buffer.grant(ticket("1"))
        assert (await buffer.receive(m.GroupFailed)).id == "1"
        await buffer.acknowledge(**{"1": "filtered"})
        await buffer.grant(ticket("2"))
        delayed: list[m.Credits] = []
        while failing.engine.requests < 2 or len(delayed) < 3:
            message, _ = await buffer.next()
            assert isinstance(message, m.Credits)
            delayed += [message] if failing.engine.requests == 2 else []
        assert message.held == ["2"]
        assert delayed[-2].status.busy_s == delayed[-1].status.busy_s, "a delay is no work"
        failing.engine.failure = None
        await buffer.grant(ticket("3"))
        assert (await buffer.receive(m.GroupFailed)).id == "2"


async def test_each_server_has_its_own_incarnation(start_server: StartServer) -> None:
    assert len({start_server().server._hello.incarnation for _ in range(2)}) == 2


async def test_a_stopped_server_sends_goodbye_last(start_server: StartServer) -> None:
    running = start_server()
    async with running.buffer(welcome=False) as buffer:
        hello = await buffer.welcome()
        await buffer.grant(ticket("1"))
        await buffer.receive(m.Deliver)
        running.task.cancel()
        assert await buffer.receive(m.ServerGoodbye) == m.ServerGoodbye(incarnation=hello.incarnation)


async def test_overdue_groups_are_sent_again_after_a_welcome(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "RESEND_S", RESEND_S)
    async with start_server().buffer(welcome=False) as buffer:
        first = await buffer.welcome()
        await buffer.grant(ticket("a"))
        await buffer.receive(m.Deliver)
        for _ in range(2):  # a silent buffer gets hellos, but no copies
            message, groups = await buffer.next()
            while isinstance(message, m.Credits):
                message, groups = await buffer.next()
            assert (message, groups) == (first, [])
        await buffer.send(m.Welcome(version=0))
        assert (await buffer.receive(m.Deliver))[0].ids == ["a"]


async def test_every_group_is_sent_again_to_a_returning_buffer(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "RESEND_S", RESEND_S)
    running = start_server()
    running.engine.gate.clear()
    names = [f"ticket-{number}" for number in range(8)]
    async with running.buffer() as buffer:
        await buffer.grant(*map(ticket, names))
        await buffer.until_held(*names)
    running.engine.gate.set()
    async with running.buffer(welcome=False) as buffer:
        delivered, done = set[str](), False
        while not done:
            message, _ = await buffer.next()
            match message:
                case m.ServerHello():
                    await buffer.send(m.Welcome(version=0))
                case m.Credits():
                    done = not message.held
                    await buffer.send(m.UnknownPeer())
                case m.Deliver():
                    delivered |= set(message.ids)
                    await buffer.send(m.Acknowledge(outcomes=dict.fromkeys(message.ids, "ready")))
        assert delivered == set(names)


async def test_pressure_changes_the_capacity_at_once(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEARTBEAT_S", NEVER_S)
    running = start_server()
    async with running.buffer() as buffer:
        running.engine.usage = Pressure(kv_cache_usage=1.0, preemptions=0)
        for capacity in (4, 2, 1):
            await buffer.receive(m.Credits, lambda credits: credits.capacity == capacity)  # noqa: B023  # called at once
        running.engine.usage = Pressure(kv_cache_usage=0.5, preemptions=0)
        await buffer.receive(m.Credits, lambda credits: credits.capacity == 8)


async def test_a_crashed_engine_means_no_capacity_until_it_restarts(start_server: StartServer) -> None:
    running = start_server()
    running.engine.gate.clear()
    async with running.buffer() as buffer:
        await buffer.grant(ticket("a"))
        await buffer.until_held("a")
        running.engine.failure = EngineError("out of memory")
        running.engine.gate.set()
        credits = await buffer.receive(m.Credits, lambda credits: credits.capacity == 0)
        assert credits.held == ["a"]
        running.may_restart.set()
        assert (await buffer.receive(m.Deliver))[0].ids == ["a"]
        credits = await buffer.receive(m.Credits, lambda credits: credits.capacity == 8)
        assert (credits.status.engine_deaths, credits.status.requests_restarted) == (1, 1)
