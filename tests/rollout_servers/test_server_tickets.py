"""Tickets of a rollout server, from their arrival to the acknowledgement of their group."""

import asyncio
from typing import Any

import pytest

from slipstream.buffer.wire import messages as m
from slipstream.env.registry import build_env
from slipstream.models.digits import TOKENS
from slipstream.rollout_servers.engines.base import Completion
from slipstream.rollout_servers.rollouts.player import Player, Unscored
from tests.rollout_servers.fake_buffer import CUT, DEADLINE_S, DONE, StartServer, eval_ticket, ticket
from tests.rollout_servers.scripted import completion

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
        assert (failed.id, failed.reason, failed.tokens) == ("e3-0", "superseded", 2)


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
