"""A rollout server that dies in the middle of episodes of several turns: their tasks are issued again."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from redis.asyncio import Redis

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.configs import RunConfig
from slipstream.env.base import Action, Split, Task, Turn
from slipstream.models.digits import EOS, TOKENS
from slipstream.rollout_servers.engines.base import Completion, Engine, Request
from slipstream.rollout_servers.engines.supervisor import RestartingEngine
from slipstream.rollout_servers.server import RolloutServer
from tests.buffer.peers import serving
from tests.faults.accounting import assert_accounted_for
from tests.faults.scripted_run import CountingLearner, FollowingEngine
from tests.rollout_servers.scripted import build_player

DEADLINE_S = 120.0
STEPS = 4


class Dialogue:
    """An env of two turns; before `released` its sessions block in the second."""

    def __init__(self) -> None:
        self.released, self.blocked, self.closed = False, 0, 0

    def size(self, split: Split) -> int:
        return 100

    def task(self, split: Split, index: int) -> Task:
        return Task(prompt="123r", reference="321")

    def fingerprint(self) -> str:
        return "dialogue"

    def session(self, task: Task) -> "Session":
        return Session(self)


class Session:
    def __init__(self, env: Dialogue) -> None:
        self.env, self.turns = env, 0

    async def reset(self) -> str:
        return "123r"

    async def step(self, action: Action) -> Turn:
        self.turns += 1
        if self.turns == 2 and not self.env.released:
            self.env.blocked += 1
            await asyncio.Event().wait()
        return Turn("4", 0.5, done=self.turns == 2)

    async def close(self) -> None:
        self.env.closed += 1


class ShortAnswers(FollowingEngine):
    async def generate(self, request: Request) -> list[Completion]:
        token_ids = [TOKENS.index("3"), TOKENS.index(EOS)]
        return [Completion(token_ids, [-1.0, -1.0], [VersionSpan(version=self.version, start=0, end=2)], "stop")]


def server(config: RunConfig, model: Path, name: str, engine: FollowingEngine, env: Dialogue) -> RolloutServer:
    async def restart() -> Engine:
        return engine

    lasting = RestartingEngine(engine, restart, config.rollout)
    return RolloutServer(config, name, build_player(config, model, lasting, env=env), lasting)


async def test_server_that_dies_between_turns_loses_no_task(
    make_run_config: Callable[..., RunConfig], model: Path, redis: Redis
) -> None:
    config = make_run_config(buffer={"server_deadline_s": 2.0})
    sampling = config.rollout.sampling.model_copy(update={"max_tokens": 16})
    learner = config.learner.model_copy(update={"steps": STEPS})
    config = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"sampling": sampling}), "learner": learner}
    )
    engine, env = ShortAnswers(), Dialogue()
    async with serving(config) as service, asyncio.timeout(DEADLINE_S):
        first = server(config, model, "r0", engine, env)
        serves = asyncio.create_task(first.run())
        while not env.blocked:
            await asyncio.sleep(0.01)
        first._is_welcome = False  # a dead server sends no goodbye
        serves.cancel()
        await asyncio.wait([serves])
        env.released = True
        again = asyncio.create_task(server(config, model, "r1", engine, env).run())
        try:
            while not (await service.ledger.counts()).reissued:
                await asyncio.sleep(0.05)
            await asyncio.to_thread(CountingLearner(config, engine).run)
            assert not again.done()
        finally:
            again.cancel()
            await asyncio.wait([again])
        await assert_accounted_for(redis, config, steps=STEPS)
    assert env.closed >= env.blocked > 0
