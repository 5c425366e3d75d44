"""What a rollout server says to the buffer and makes of its answers, with a buffer driven by hand."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import decode, decode_group, encode
from slipstream.buffer.wire.sockets import bind_router
from slipstream.configs import RunConfig
from slipstream.configs.tiny_model import TOKENS
from slipstream.env.registry import build_env
from slipstream.rewards.pool import Scorer
from slipstream.rollout_servers import server
from slipstream.rollout_servers.engines.base import Completion, EngineError, Pressure
from slipstream.rollout_servers.engines.restart import RestartingEngine
from slipstream.rollout_servers.episode import Answered, Player
from slipstream.rollout_servers.server import RolloutServer
from slipstream.rollout_servers.text import Text
from tests.conftest import free_port
from tests.rollout_servers.scripted import ScriptedEngine, completion

DEADLINE_S = 60.0
NEVER_S = 1000.0
RESEND_S = 0.2
WRONG = TOKENS.index("c")
DONE = completion([3, 4])
CUT = completion([3], finish_reason="abort")


@dataclass
class PatientEngine(ScriptedEngine):
    """Answers only when it is let; counts the questions."""

    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    questions: int = 0
    greedy_answers: list[Completion] = field(default_factory=list)

    async def generate(
        self,
        prompt_ids: object,
        *,
        samples: int,
        greedy: bool,
        deadline_s: float,
        max_tokens: int | None = None,
    ) -> list[Completion]:
        self.questions += 1
        await self.may_answer.wait()
        if self.failure is not None:
            raise self.failure
        return self.greedy_answers if greedy and self.greedy_answers else self.answers


@dataclass
class Buffer:
    """The buffer's end of the line."""

    socket: zmq.asyncio.Socket

    async def says(self, *messages: m.Message) -> None:
        for message in messages:
            await self.socket.send_multipart([b"server-1", encode(message)])

    async def hears(self, kind: type, met: Callable[[Any], bool] = lambda message: True) -> Any:
        """The next message of a kind that is as wanted; groups come with `Deliver`, as a pair."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                message, groups = await self.next()
                if isinstance(message, kind) and met(message):
                    return (message, groups) if kind is m.Deliver else message

    async def next(self) -> tuple[Any, list[m.Group]]:
        async with asyncio.timeout(DEADLINE_S):
            _, first, *blobs = await self.socket.recv_multipart()
        return decode(first, m.ToService), [decode_group(blob) for blob in blobs]

    async def welcomes(self) -> m.ServerHello:
        hello: m.ServerHello = await self.hears(m.ServerHello)
        await self.says(m.Welcome(version=0))
        return hello


@dataclass
class Line:
    """A server that runs, its engine, and the means to answer it."""

    config: RunConfig
    server: RolloutServer
    running: "asyncio.Task[None]"
    engine: PatientEngine
    may_restart: asyncio.Event

    @asynccontextmanager
    async def buffer(self) -> AsyncIterator[Buffer]:
        """A buffer that listens until it is cut off."""
        context = zmq.asyncio.Context()
        try:
            yield Buffer(bind_router(context, self.config.buffer.bind, max_message_bytes=1 << 24))
        finally:
            context.destroy(linger=0)


MakeLine = Callable[..., Line]


@pytest.fixture
async def make_line(
    model: Path, free_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MakeLine]:
    lines: list[Line] = []
    monkeypatch.setattr(server, "HEARTBEAT_S", 0.1)

    def make(*answers: Completion, **rollout: Any) -> Line:
        config = RunConfig.model_validate(
            {
                "run": {"name": "line", "dir": tmp_path},
                "model": {"path": model},
                "env": {"name": "digits", "options": {"operation": "reverse", "length": 3}},
                "rewards": [{"name": "digit_match"}],
                "scoring": {"workers": 0},
                "buffer": {"bind": free_address, "endpoint": free_address},
                "rollout": {
                    "group_size": 4,
                    "groups_in_flight": 8,
                    "resend_s": NEVER_S,
                    "concurrency": {"interval_s": 0.05},
                    "engine": {"restart": {"backoff_s": 0.01}},
                }
                | rollout,
                "weights": {"control_port": free_port()},
            }
        )
        engine = PatientEngine(answers=list(answers) or [DONE] * 4)
        engine.may_answer.set()

        may_restart = asyncio.Event()

        async def start() -> PatientEngine:
            await may_restart.wait()
            successor = PatientEngine(answers=engine.answers)
            successor.may_answer.set()
            return successor

        lasting = RestartingEngine(engine, start, config.rollout)
        player = Player(config, build_env(config.env), Text(model), lasting, Scorer.from_config(config))
        serving = RolloutServer(config, "server-1", player, lasting)
        lines.append(Line(config, serving, asyncio.create_task(serving.run()), engine, may_restart))
        return lines[-1]

    yield make
    for line in lines:
        assert not line.running.done(), "the server must not end by itself"
        line.running.cancel()
        await asyncio.wait([line.running], timeout=DEADLINE_S)


def ticket(name: str, *, kind: str = m.TRAIN, greedy: bool = False) -> m.Ticket:
    return m.Ticket(id=name, kind=kind, epoch=0, indices=[0], samples=4, version=0, greedy=greedy)


async def test_a_server_says_hello_first_and_how_it_does_only_once_it_is_welcome(make_line: MakeLine) -> None:
    async with make_line().buffer() as buffer:
        hellos = [(await buffer.next())[0] for _ in range(3)]  # unanswered, it is repeated
        assert all(isinstance(hello, m.ServerHello) for hello in hellos)
        assert len({hello.incarnation for hello in hellos}) == 1
        await buffer.says(m.Welcome(version=0))
        credits = await buffer.hears(m.Credits)
        assert (credits.capacity, credits.held) == (8, [])
        assert isinstance((await buffer.next())[0], m.Credits), "a welcome server does not say hello again"


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


async def test_every_start_of_a_server_is_an_incarnation_of_its_own(make_line: MakeLine) -> None:
    hellos = [make_line().server._hello, make_line().server._hello]
    assert hellos[0].incarnation != hellos[1].incarnation


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


async def test_a_silent_buffer_is_asked_whether_it_is_there_and_then_gets_what_it_has_not_acknowledged(
    make_line: MakeLine,
) -> None:
    async with make_line(resend_s=RESEND_S).buffer() as buffer:
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


async def test_a_buffer_that_was_away_gets_every_group_when_it_is_back(make_line: MakeLine) -> None:
    line = make_line(resend_s=RESEND_S)
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
    line = make_line(concurrency={"interval_s": 0.5})
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
