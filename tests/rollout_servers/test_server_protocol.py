"""Messages between a rollout server and the buffer: joining, heartbeats, credits, resends."""

import asyncio
from typing import Any

import pytest
import structlog

from slipstream.buffer.wire import messages as m
from slipstream.env.registry import build_env
from slipstream.models.digits import TOKENS
from slipstream.rollout_servers import server, tickets
from slipstream.rollout_servers.engines.base import Completion, EngineError, Pressure, RequestRefused
from slipstream.rollout_servers.rollouts.player import Player, Unscored
from slipstream.rollout_servers.weights import follower
from tests.rollout_servers.fake_buffer import CUT, DEADLINE_S, DONE, NEVER_S, StartServer, eval_ticket, ticket
from tests.rollout_servers.scripted import completion

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


@pytest.mark.parametrize("finishes", [True, False], ids=["finished in time", "given back"])
async def test_leaving_server_delivers_or_gives_back(start_server: StartServer, finishes: bool) -> None:
    running = start_server(notice_s=NEVER_S if finishes else 0.2, group_deadline_s=DEADLINE_S)
    running.engine.gate.clear()
    async with running.buffer() as buffer:
        await buffer.grant(ticket("a"))
        await buffer.until_held("a")
        running.server.leave()
        credits = await buffer.until_held("a")
        if credits.capacity:  # sent before
            credits = await buffer.receive(m.Credits)
        assert (credits.capacity, credits.held) == (0, ["a"])
        await buffer.grant(ticket("late"))
        if finishes:
            running.engine.gate.set()
            _, (group,) = await buffer.receive(m.Deliver)
            assert group.id == "a"
            await buffer.acknowledge(a="ready")
        await buffer.receive(m.ServerGoodbye)
        async with asyncio.timeout(DEADLINE_S):
            await running.task
    assert running.engine.requests == 1


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


async def test_a_stopped_server_sends_goodbye_last(start_server: StartServer) -> None:
    running = start_server()
    async with running.buffer(welcome=False) as buffer:
        hello = await buffer.welcome()
        await buffer.grant(ticket("1"))
        await buffer.receive(m.Deliver)
        running.task.cancel()
        goodbye = m.ServerGoodbye(incarnation=hello.incarnation, sampled={"digits": {"1": 8}})
        assert await buffer.receive(m.ServerGoodbye) == goodbye


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
        running.engine.usage = Pressure(kv_cache_usage=1.0, preemptions=0, running=8, waiting=80)
        for capacity in (4, 2, 1):
            credits = await buffer.receive(m.Credits, lambda credits: credits.capacity == capacity)  # noqa: B023  # now
            assert credits.status.groups_limit == capacity
            assert credits.status.kv_cache_use is not None


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


# --- tickets of a rollout server, from their arrival to the acknowledgement of their group ----------------------------


WRONG = TOKENS.index("c")


async def test_tickets_are_held_until_acknowledged(start_server: StartServer) -> None:
    running = start_server()
    running.engine.gate.clear()
    async with running.buffer() as buffer:
        await buffer.grant(ticket("a"), ticket("b"))
        await buffer.until_held("a", "b")
        running.engine.gate.set()
        await buffer.receive(m.Deliver)
        await buffer.until_held("a", "b")
        await buffer.acknowledge(a="filtered")
        await buffer.until_held("b")
        running.engine.answers = [CUT]
        await buffer.grant(ticket("c"))
        failed = await buffer.receive(m.GroupFailed)
        assert (failed.id, failed.reason, failed.tokens) == ("c", "generation_timeout", 1)
        await buffer.until_held("b", "c")
        await buffer.acknowledge(c="filtered")
        await buffer.until_held("b")


async def test_repeated_tickets_are_played_once(start_server: StartServer) -> None:
    running = start_server()
    running.engine.gate.clear()
    async with running.buffer() as buffer:
        both = m.Tickets(tickets=[ticket("a"), ticket("b")])
        await buffer.send(both, both)
        await buffer.until_held("a", "b")
        running.engine.gate.set()
        delivered = list[str]()
        while len(delivered) < 2:
            delivered += (await buffer.receive(m.Deliver))[0].ids
        assert sorted(delivered) == ["a", "b"]
        await buffer.acknowledge(a="ready", b="ready")
        await buffer.send(both, m.Tickets(tickets=[ticket("c")]))
        assert (await buffer.receive(m.Deliver))[0].ids == ["c"]
        await buffer.grant(ticket("a"))  # under a new grant: Redis has lost the end of its file
        assert (await buffer.receive(m.Deliver))[0].ids == ["a"]
    assert running.engine.requests == 4


@pytest.mark.parametrize(("answers", "missing"), [((DONE, CUT, DONE, CUT), 2), ((DONE,) * 4, 0)], ids=["two", "none"])
async def test_a_group_counts_missing_episodes(
    start_server: StartServer, answers: tuple[Completion, ...], missing: int
) -> None:
    async with start_server(*answers, min_episodes=2).buffer() as buffer:
        await buffer.grant(ticket("a"))
        _, (group,) = await buffer.receive(m.Deliver)
        assert (len(group.trajectories), group.missing) == (4 - missing, missing)
        assert [trajectory.episode for trajectory in group.trajectories] == list(range(4 - missing))
        assert group.greedy_reward is None


async def test_a_greedy_baseline_is_played_beside_its_group(start_server: StartServer) -> None:
    running = start_server(*[completion([WRONG] * 2)] * 4)
    reference = build_env(running.config.env).task("train", 0).reference
    running.engine.greedy_answers = [completion([TOKENS.index(digit) for digit in reference])]
    running.engine.gate.clear()
    async with running.buffer() as buffer:
        await buffer.grant(ticket("a", greedy=True))
        await buffer.receive(m.Credits, lambda credits: running.engine.requests == 2)  # both at once
        running.engine.gate.set()
        _, (group,) = await buffer.receive(m.Deliver)
        assert ([trajectory.reward for trajectory in group.trajectories], group.missing) == ([0.0] * 4, 0)
        assert group.greedy_reward == 1.0
        credits = await buffer.receive(m.Credits, lambda credits: credits.status.tokens_generated > 0)
        assert credits.status.tokens_generated == 4 * 2 + 3


async def test_a_failed_greedy_baseline_fails_its_group(start_server: StartServer) -> None:
    running = start_server()
    running.engine.greedy_answers = [CUT]
    async with running.buffer() as buffer:
        await buffer.grant(ticket("a", greedy=True))
        failed = await buffer.receive(m.GroupFailed)
        assert (failed.id, failed.reason) == ("a", "generation_timeout")


async def test_a_repeated_eval_ticket_does_not_hold_the_version(start_server: StartServer) -> None:
    running = start_server(DONE)
    async with running.buffer() as buffer:
        await buffer.grant(eval_ticket("e"))
        await buffer.receive(m.Deliver)
        await buffer.grant(eval_ticket("e"), ticket("after"))
        await buffer.receive(m.Credits, lambda credits: "after" in credits.held)
        async with asyncio.timeout(DEADLINE_S):
            await running.server._hold.released()


async def test_a_superseded_answer_fails_its_task_only(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, answers = start_server(), [of_versions(3), of_versions(3, 4), CUT, of_versions(3)]

    async def generate(*_: Any, **__: Any) -> list[Completion]:
        return [answers.pop(0)]

    monkeypatch.setattr(running.engine, "generate", generate)
    async with running.buffer() as buffer:
        await buffer.grant(eval_ticket("e3-0", indices=(0, 1, 2, 3), version=3))
        _, (group,) = await buffer.receive(m.Deliver)
        assert (group.missing, group.failures) == (2, {"superseded": 1, "generation_timeout": 1})
        assert [trajectory.episode for trajectory in group.trajectories] == [0, 1]
        assert {span.version for trajectory in group.trajectories for span in trajectory.spans} == {3}


async def test_an_eval_ticket_without_answers_fails(start_server: StartServer) -> None:
    async with start_server(of_versions(3, 4)).buffer() as buffer:
        await buffer.grant(eval_ticket("e3-0", indices=(0, 1), version=3))
        failed = await buffer.receive(m.GroupFailed)
        assert (failed.id, failed.reason, failed.tokens) == ("e3-0", "superseded", 4)


def of_versions(*versions: int) -> Completion:
    """An answer with one token of each version."""
    spans = [m.VersionSpan(version=version, start=place, end=place + 1) for place, version in enumerate(versions)]
    return Completion([3] * len(versions), [-1.0] * len(versions), spans, "stop")


async def test_the_version_is_not_held_while_an_evaluation_is_scored(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    scoring = asyncio.Event()

    async def score_for_ever(player: Player, unscored: Unscored) -> list[m.Trajectory]:
        scoring.set()
        return await asyncio.Future()

    monkeypatch.setattr(Player, "score", score_for_ever)
    running = start_server(DONE)
    async with running.buffer() as buffer:
        await buffer.grant(eval_ticket("e", indices=(0, 1)))
        async with asyncio.timeout(DEADLINE_S):
            await scoring.wait()
        async with asyncio.timeout(DEADLINE_S):
            await running.server._hold.released()
