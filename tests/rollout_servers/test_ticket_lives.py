"""What a rollout server makes of a ticket, until the buffer acknowledges what has become of it."""

import asyncio
from typing import Any

import pytest

from slipstream.buffer.wire import messages as m
from slipstream.configs.digits_model import TOKENS
from slipstream.env.registry import build_env
from slipstream.rollout_servers.engines.base import Completion
from slipstream.rollout_servers.rollouts.single_turn import Answered, Player
from tests.rollout_servers.line import CUT, DEADLINE_S, DONE, MakeLine, ticket
from tests.rollout_servers.scripted import completion

WRONG = TOKENS.index("c")


async def test_tickets_are_held_from_their_arrival_until_their_group_is_acknowledged(make_line: MakeLine) -> None:
    line = make_line()
    line.engine.may_answer.clear()
    async with line.buffer() as buffer:
        await buffer.welcomes()
        await buffer.says(m.Tickets(tickets=[ticket("a"), ticket("b")]))
        await buffer.hears(m.Credits, lambda credits: credits.held == ["a", "b"])
        line.engine.may_answer.set()
        await buffer.hears(m.Deliver)
        await buffer.hears(m.Credits, lambda credits: credits.held == ["a", "b"])
        await buffer.says(m.Acknowledge(outcomes={"a": "filtered"}))
        await buffer.hears(m.Credits, lambda credits: credits.held == ["b"])


async def test_a_ticket_that_came_to_nothing_is_held_until_the_word_of_it_is_acknowledged(make_line: MakeLine) -> None:
    async with make_line(CUT).buffer() as buffer:
        await buffer.welcomes()
        await buffer.says(m.Tickets(tickets=[ticket("a")]))
        failed = await buffer.hears(m.GroupFailed)
        assert (failed.id, failed.reason, failed.tokens) == ("a", "generation_timeout", 1)
        await buffer.hears(m.Credits, lambda credits: credits.held == ["a"])
        await buffer.says(m.Acknowledge(outcomes={"a": "filtered"}))
        await buffer.hears(m.Credits, lambda credits: not credits.held)


async def test_a_ticket_that_arrives_twice_is_played_once(make_line: MakeLine) -> None:
    line = make_line()
    line.engine.may_answer.clear()
    async with line.buffer() as buffer:
        await buffer.welcomes()
        both = m.Tickets(tickets=[ticket("a"), ticket("b")])
        await buffer.says(both, both)
        await buffer.hears(m.Credits, lambda credits: credits.held == ["a", "b"])
        line.engine.may_answer.set()
        came = list[str]()
        while len(came) < 2:
            delivered, _ = await buffer.hears(m.Deliver)
            came += delivered.ids
        assert sorted(came) == ["a", "b"]
        await buffer.says(m.Acknowledge(outcomes={"a": "ready", "b": "ready"}))
        await buffer.says(both, m.Tickets(tickets=[ticket("c")]))
        delivered, _ = await buffer.hears(m.Deliver)
        assert delivered.ids == ["c"]
    assert line.engine.questions == 3


async def test_tickets_with_the_ids_of_settled_ones_are_played_where_redis_has_lost_those(make_line: MakeLine) -> None:
    line = make_line()
    async with line.buffer() as buffer:
        await buffer.welcomes()
        for _ in range(2):
            await buffer.says(m.Tickets(tickets=[ticket("a")]))
            await buffer.hears(m.Deliver)
            await buffer.says(m.Acknowledge(outcomes={"a": "ready"}))
            await buffer.hears(m.Credits, lambda credits: not credits.held)
    assert line.engine.questions == 2


async def test_a_group_says_how_many_of_its_answers_are_missing(make_line: MakeLine) -> None:
    async with make_line(DONE, CUT, DONE, CUT, min_group_size=2).buffer() as buffer:
        await buffer.welcomes()
        await buffer.says(m.Tickets(tickets=[ticket("a")]))
        _, (group,) = await buffer.hears(m.Deliver)
        assert (len(group.trajectories), group.missing) == (2, 2)


async def test_a_whole_group_misses_nothing(make_line: MakeLine) -> None:
    async with make_line(min_group_size=2).buffer() as buffer:
        await buffer.welcomes()
        await buffer.says(m.Tickets(tickets=[ticket("a")]))
        _, (group,) = await buffer.hears(m.Deliver)
        assert (len(group.trajectories), group.missing) == (4, 0)


async def test_a_ticket_that_asks_for_a_baseline_gets_the_reward_of_a_greedy_answer_beside_its_group(
    make_line: MakeLine,
) -> None:
    line = make_line(*[completion([WRONG] * 2)] * 4)
    reference = build_env(line.config.env).task("train", 0).reference
    line.engine.greedy_answers = [completion([TOKENS.index(digit) for digit in reference])]
    line.engine.may_answer.clear()
    async with line.buffer() as buffer:
        await buffer.welcomes()
        await buffer.says(m.Tickets(tickets=[ticket("a", greedy=True)]))
        await buffer.hears(m.Credits, lambda credits: line.engine.questions == 2)  # both at once
        line.engine.may_answer.set()
        _, (group,) = await buffer.hears(m.Deliver)
        assert ([trajectory.reward for trajectory in group.trajectories], group.missing) == ([0.0] * 4, 0)
        assert group.greedy_reward == 1.0
        credits = await buffer.hears(m.Credits, lambda credits: credits.status.tokens_generated > 0)
        assert credits.status.tokens_generated == 4 * 2 + 3


async def test_a_ticket_that_asks_for_no_baseline_gets_none(make_line: MakeLine) -> None:
    line = make_line()
    async with line.buffer() as buffer:
        await buffer.welcomes()
        await buffer.says(m.Tickets(tickets=[ticket("a")]))
        _, (group,) = await buffer.hears(m.Deliver)
        assert (group.greedy_reward, line.engine.questions) == (None, 1)


async def test_a_greedy_answer_that_fails_fails_its_group(make_line: MakeLine) -> None:
    line = make_line()
    line.engine.greedy_answers = [CUT]
    async with line.buffer() as buffer:
        await buffer.welcomes()
        await buffer.says(m.Tickets(tickets=[ticket("a", greedy=True)]))
        failed = await buffer.hears(m.GroupFailed)
        assert (failed.id, failed.reason) == ("a", "generation_timeout")


async def test_an_evaluation_ticket_that_arrives_twice_does_not_hold_the_version_for_ever(make_line: MakeLine) -> None:
    line = make_line(DONE)
    async with line.buffer() as buffer:
        await buffer.welcomes()
        held_out = m.Ticket(id="e", kind=m.EVAL, epoch=0, indices=[0], samples=1, version=0)
        await buffer.says(m.Tickets(tickets=[held_out]))
        await buffer.hears(m.Deliver)
        await buffer.says(m.Tickets(tickets=[held_out, ticket("after")]))
        await buffer.hears(m.Credits, lambda credits: "after" in credits.held)
        assert await line.server._hold.released(DEADLINE_S)


async def test_an_evaluation_that_newer_weights_have_mixed_with_is_given_back(
    make_line: MakeLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = make_line()

    async def updated(*asked: Any, **how: Any) -> list[Completion]:
        """The first answer is of version 3, all later ones are of version 4."""
        line.engine.version = 4 if line.engine.version else 3
        return [completion([3, 4], version=line.engine.version)]

    monkeypatch.setattr(line.engine, "generate", updated)
    async with line.buffer() as buffer:
        await buffer.welcomes()
        mixed, whole = [
            m.Ticket(id=f"e{version}-0", kind=m.EVAL, epoch=0, indices=[0, 1], samples=1, version=version)
            for version in (3, 4)
        ]
        await buffer.says(m.Tickets(tickets=[mixed]))
        failed = await buffer.hears(m.GroupFailed)
        assert (failed.id, failed.reason) == ("e3-0", "superseded")
        await buffer.says(m.Acknowledge(outcomes={"e3-0": "filtered"}), m.Tickets(tickets=[whole]))
        delivered, _ = await buffer.hears(m.Deliver)
        assert delivered.ids == ["e4-0"]


async def test_an_evaluation_whose_answers_are_all_there_holds_no_version_while_it_is_scored(
    make_line: MakeLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scoring = asyncio.Event()

    async def score_for_ever(player: Player, answered: Answered) -> list[m.Trajectory]:
        scoring.set()
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(Player, "score", score_for_ever)
    line = make_line(DONE)
    async with line.buffer() as buffer:
        await buffer.welcomes()
        await buffer.says(
            m.Tickets(tickets=[m.Ticket(id="e", kind=m.EVAL, epoch=0, indices=[0, 1], samples=1, version=0)])
        )
        async with asyncio.timeout(DEADLINE_S):
            await scoring.wait()
        assert await line.server._hold.released(DEADLINE_S)
