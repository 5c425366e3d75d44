"""Rollout servers that end in the middle of episodes: others go on from the finished steps, whose tokens are kept."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from slipstream.buffer.store.account import Tokens, account
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.reader import LedgerReader
from slipstream.buffer.store.spill import SpillFolder
from slipstream.buffer.wire import codec
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.env.base import Action, AgentEndpoint, Env, Split, Task, Turn
from slipstream.models.tokenizer import Tokenizer
from slipstream.rollout_servers.engines.base import Completion, Engine, Request
from slipstream.rollout_servers.engines.supervisor import RestartingEngine
from slipstream.rollout_servers.server import RolloutServer
from tests.buffer.peers import serving
from tests.faults.accounting import assert_accounted_for
from tests.faults.scripted_run import CountingLearner, FollowingEngine
from tests.rollout_servers.rollouts.chat import build_chat_model
from tests.rollout_servers.rollouts.gateway.harness import AgentTask, Http, client, until
from tests.rollout_servers.rollouts.test_conversation import chat_answer
from tests.rollout_servers.scripted import build_player

DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_model(tmp_path_factory.mktemp("resume") / "model", "chatml")


@dataclass
class Numbered(FollowingEngine):
    """Numbers its answers, over all servers.

    Attributes:
        calls: contexts with their answers.
    """

    tokenizer: Tokenizer | None = None
    calls: list[tuple[list[int], list[int]]] = field(default_factory=list)

    async def generate(self, request: Request) -> list[Completion]:
        assert self.tokenizer is not None
        answer = chat_answer(self.tokenizer, f"Answer {len(self.calls)}.<|im_end|>", version=self.version)
        self.calls.append((list(request.prompt_ids), list(answer.token_ids)))
        return [answer]


@dataclass
class Fleet:
    """Servers of one run, in this process."""

    config: RunConfig
    model: Path
    engine: Numbered
    env: Env
    running: "dict[str, tuple[RolloutServer, asyncio.Task[None]]]" = field(default_factory=dict)

    def start(self, name: str) -> None:
        async def restart() -> Engine:
            return self.engine

        lasting = RestartingEngine(self.engine, restart, self.config.rollout)
        server = RolloutServer(self.config, name, build_player(self.config, self.model, lasting, env=self.env), lasting)
        self.running[name] = server, asyncio.create_task(server.run())

    async def end(self, name: str, *, killed: bool = True) -> None:
        server, task = self.running.pop(name)
        if killed:
            server._is_welcome = False  # a dead server sends no goodbye
        task.cancel()
        await asyncio.wait([task])

    async def gateway(self, name: str) -> Http:
        file = self.config.paths.gateways / f"{name}.json"

        async def found() -> bool:
            return file.exists()

        await until(found)
        given = json.loads(file.read_text())
        return Http(given["url"], given["key"])


@asynccontextmanager
async def fleet(
    make: Callable[..., RunConfig], model: Path, env: Env, *, group_size: int = 1, steps: int = 1
) -> AsyncIterator[Fleet]:
    config = make(
        buffer={"server_deadline_s": 2.0, "max_staleness": 0},  # one group at a time
        model={"path": str(model), "dtype": "float32"},
        rewards=[{"name": "none"}],
        rollout={
            "group_size": group_size,
            "groups_in_flight": 1,
            "group_deadline_s": 60.0,
            "sampling": {"max_tokens": 24},
            "episode": {"tokens": 1000},
            "engine": {"name": "hf", "max_model_len": 2048},
        },
        learner={
            "steps": steps,
            "groups_per_step": 1,
            "updates_per_step": 1,
            "advantage": {"name": "reinforce_plus_plus"},
            "wait_deadline_s": 90.0,
            "optimizer": {"warmup_steps": 0},
        },
    )
    tokenizer = Tokenizer(model)
    servers = Fleet(config, model, Numbered(tokenizer=tokenizer), env)
    async with serving(config), asyncio.timeout(DEADLINE_S):
        try:
            yield servers
        finally:
            for name in list(servers.running):
                await servers.end(name)


async def trained(servers: Fleet, redis: Redis, *, steps: int = 1) -> tuple[list[m.Trajectory], Tokens]:
    """Trains; the trajectories of the first group, and the account, which closes."""
    await asyncio.to_thread(CountingLearner(servers.config, servers.engine).run)
    history = await assert_accounted_for(redis, servers.config, steps=steps)
    reader = LedgerReader(redis, servers.config.run.name, SpillFolder(servers.config.paths.spill))
    (record,) = await reader.groups(history[0])
    assert record is not None and record.blob is not None
    found = await account(Ledger(redis, servers.config).scripts)
    assert not found.problems()
    return list(codec.decode_group(record.blob).trajectories), found.total


def actions(trajectory: m.Trajectory) -> list[int]:
    return [int(token) for token in codec.token_ids(trajectory)[codec.action_mask(trajectory) == 1]]


async def test_agent_from_outside_goes_on_at_another_server(
    make_run_config: Callable[..., RunConfig], chat_model: Path, redis: Redis
) -> None:
    async with fleet(make_run_config, chat_model, AgentTask(None), group_size=2) as servers:
        servers.start("first")
        gateway = await servers.gateway("first")
        keys = list[tuple[str, str]]()
        for _ in range(2):

            async def opens() -> bool:
                response = await gateway.ask("/sessions", b"")
                if response.status_code == 201:
                    keys.append((response.json()["id"], response.json()["api_key"]))
                return response.status_code == 201

            await until(opens)
        dialogues: list[list[Any]] = [[{"role": "user", "content": f"Question {number}"}] for number in range(2)]
        answers = list[list[str]]([[], []])

        async def ask(session: Http, number: int) -> str:
            response = (await session.chat(dialogues[number])).raise_for_status().json()
            message = response["choices"][0]["message"]
            answers[number].append(message["content"])
            dialogues[number] += [message, {"role": "user", "content": "And now?"}]
            return str(response["id"])

        session = [Http(f"{gateway._url}/s/{each}", key) for each, key in keys]
        first = await ask(session[0], 0)
        await ask(session[0], 0)
        (await session[0].ask("/reward", {"reward": 0.25, "completion_id": first})).raise_for_status()
        (await session[0].ask("/close", {"state": "done"})).raise_for_status()
        await ask(session[1], 1)
        before = len(servers.engine.calls)

        await servers.end("first")
        servers.start("second")
        gateway = await servers.gateway("second")
        session = [Http(f"{gateway._url}/s/{each}", key) for each, key in keys]

        async def adopted() -> bool:
            return (await session[1].ask("")).status_code == 200

        assert not await adopted()
        await until(adopted)
        assert (await Http(session[1]._url, keys[0][1]).chat(dialogues[1])).status_code == 401
        await ask(session[1], 1)
        await ask(session[1], 1)
        shown = (await session[1].ask("")).json()
        assert (shown["roots"], len(shown["nodes"])) == (1, 3)
        (await session[1].ask("/reward", {"reward": 0.75})).raise_for_status()
        (await session[1].ask("/close", {"state": "done"})).raise_for_status()
        trajectories, total = await trained(servers, redis)
        assert len(servers.engine.calls) == before + 2, "no call is answered twice"
        for (context, answer), (following, _) in itertools.pairwise(servers.engine.calls[2:]):
            assert following[: len(context) + len(answer)] == context + answer, "goes on from the ids"
        assert sorted(each.reward for each in trajectories) == [0.25, 0.75]
        calls = [answer for _, answer in servers.engine.calls]
        found = sorted(actions(each) for each in trajectories)
        assert found == sorted([calls[0] + calls[1], calls[2] + calls[3] + calls[4]])
        assert total.taken_over == total.lost["resumed"] == sum(map(len, calls[:3]))
        assert total.generated == total.trained == sum(map(len, calls))


async def test_agent_is_run_again_from_its_finished_calls(
    make_run_config: Callable[..., RunConfig], chat_model: Path, redis: Redis
) -> None:
    reached, runs = asyncio.Event(), 0

    async def agent(task: Task, endpoint: AgentEndpoint) -> float:
        nonlocal runs
        runs += 1
        messages: list[Any] = [{"role": "user", "content": "Hello"}]
        async with client(endpoint) as model:
            for turn in range(4):
                if turn == 2 and runs == 1:
                    reached.set()
                    await asyncio.Event().wait()
                answer = await model.chat.completions.create(model=endpoint.model, messages=messages)
                messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": f"Turn {turn}"}]
        return 0.5

    async with fleet(make_run_config, chat_model, AgentTask(agent)) as servers:
        servers.start("first")

        async def is_reached() -> bool:
            return reached.is_set()

        await until(is_reached)
        await servers.end("first")
        servers.start("second")
        (trajectory,), total = await trained(servers, redis)
        assert runs >= 2
        calls = [answer for _, answer in servers.engine.calls[:4]]
        assert actions(trajectory) == [token for answer in calls for token in answer]
        assert total.taken_over == total.lost["resumed"] == sum(map(len, calls[:2]))


class Dialogue:
    """An env of three turns; the second blocks until `released`."""

    def __init__(self, *, resumable: bool, repeats: bool) -> None:
        self.resumable, self.repeats = resumable, repeats
        self.released, self.blocked, self.opened = False, 0, 0

    def size(self, split: Split) -> int:
        return 100

    def task(self, split: Split, index: int) -> Task:
        return Task(prompt=[{"role": "user", "content": "Hello"}], reference="")

    def fingerprint(self) -> str:
        return "dialogue"

    def session(self, task: Task) -> "Session":
        self.opened += 1
        return Session(self, self.opened)


class Session:
    def __init__(self, env: Dialogue, number: int) -> None:
        self.env, self.number, self.turns = env, number, 0
        self.resumable = env.resumable

    async def reset(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": "Hello"}]

    async def step(self, action: Action) -> Turn:
        self.turns += 1
        if self.turns == 2 and not self.env.released:
            self.env.blocked += 1
            await asyncio.Event().wait()
        number = 0 if self.env.repeats else self.number
        return Turn([{"role": "user", "content": f"{number}, turn {self.turns}"}], 0.5, done=self.turns == 3)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("resumable", "repeats", "lost"), [(True, True, "resumed"), (True, False, "not_resumed"), (False, True, None)]
)
async def test_episode_of_several_turns_goes_on(
    make_run_config: Callable[..., RunConfig],
    chat_model: Path,
    redis: Redis,
    resumable: bool,
    repeats: bool,
    lost: str | None,
) -> None:
    env = Dialogue(resumable=resumable, repeats=repeats)
    async with fleet(make_run_config, chat_model, env) as servers:
        servers.start("first")

        async def blocks() -> bool:
            return env.blocked > 0

        await until(blocks)
        if resumable:
            await until(lambda: kept(redis, servers.config))
        await servers.end("first")
        env.released = True
        servers.start("second")
        (trajectory,), total = await trained(servers, redis)
        assert trajectory.reward == 1.5
        calls = [answer for _, answer in servers.engine.calls]
        used = calls[:3] if lost == "resumed" else calls[2:5]
        assert actions(trajectory) == [token for answer in used for token in answer]
        assert lost is None or total.lost[lost] > 0
        assert total.taken_over == total.lost.get("resumed", 0) == (sum(map(len, calls[:2])) if resumable else 0)


async def kept(redis: Redis, config: RunConfig) -> bool:
    """True once both turns are kept."""
    names = [name async for name in redis.scan_iter(f"*{config.run.name}}}:events:*")]
    return [await redis.hlen(name) for name in names] == [2]
