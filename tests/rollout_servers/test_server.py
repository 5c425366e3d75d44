"""A rollout server with vLLM, against the real buffer service on a real Redis-protocol server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import zmq.asyncio
from redis.asyncio import Redis

from slipstream.buffer.cli import serve
from slipstream.buffer.service import BufferService
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import Outage
from slipstream.buffer.store.scripts import group_key
from slipstream.buffer.wire import codec
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.sockets import bind_router, connect_dealer
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError, RefusedError
from slipstream.env.registry import build_env
from slipstream.rollout_servers.engines.base import Engine, EngineError
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.engines.supervisor import RestartingEngine
from slipstream.rollout_servers.server import RolloutServer
from slipstream.rollout_servers.tokenizer import Tokenizer
from tests.conftest import free_port
from tests.rollout_servers.plugins import FAULTY_PROMPTS
from tests.rollout_servers.scripted import ScriptedEngine, build_player

DEADLINE_S = 60.0
PLUGINS = "tests.rollout_servers.plugins"
CAPACITY = 8
"""Groups that may be under way before the first version: (max_staleness + 1) · groups_per_step."""

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # vLLM and what it imports warn of their own futures.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

SETTINGS: dict[str, Any] = {
    "env": {"name": "digits", "options": {"operation": "reverse", "length": 3}},
    "rewards": [{"name": "digit_match"}],
    "scoring": {"workers": 0},
    "eval": {"tasks": 100},
    "buffer": {"max_staleness": 1},
    "rollout": {
        "group_size": 4,
        "sampling": {"max_tokens": 3, "ignore_eos": True},
        "engine": {"core": "inline", "max_model_len": 32, "max_sequences": 64, "kv_cache_bytes": 32 << 20},
    },
    "learner": {"groups_per_step": 4, "updates_per_step": 1},
    "weights": {"transport": "gloo"},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(model: Path) -> AsyncIterator[Engine]:
    config = RunConfig.model_validate(SETTINGS | {"model": {"path": model, "dtype": "float32"}})
    engine = await start_engine(config, model, eos_token_ids=())
    yield engine
    await engine.close()


@dataclass
class Run:
    """The ledger and the configuration of a run."""

    config: RunConfig
    redis: Redis
    ledger: Ledger

    @asynccontextmanager
    async def buffer(self) -> AsyncIterator[BufferService]:
        """A running buffer service."""
        context = zmq.asyncio.Context()
        socket = bind_router(context, self.config.buffer.bind, max_message_bytes=1 << 24)
        service = BufferService(self.config, self.ledger, socket, Outage(self.config.redis))
        try:
            async with cancelled_after(service.run()):
                yield service
        finally:
            context.destroy(linger=0)

    def server(self, engine: Engine, **changes: Any) -> RolloutServer:
        """A rollout server of this run, or of one that differs from it."""
        config = RunConfig.model_validate(self.config.model_dump() | changes)
        assert config.model.path is not None, "set in the fixture"
        lasting = RestartingEngine(engine, no_restart, config.rollout)
        return RolloutServer(config, "server-1", build_player(config, config.model.path, lasting), lasting)

    async def until(self, met: Callable[[m.LedgerCounts], bool]) -> m.LedgerCounts:
        """Waits for a state of the ledger and returns it."""
        counts = m.LedgerCounts()

        async def look() -> bool:
            nonlocal counts
            counts = await self.ledger.counts()
            return met(counts)

        await wait_for(look, lambda: counts)
        return counts

    async def ready_groups(self) -> list[m.Group]:
        """Everything that is ready, leased for step 1."""
        counts = await self.ledger.counts()
        lease = await self.ledger.lease(1, consuming_version=0, count=counts.ready)
        assert lease is not None, "that many were ready"
        return await self.groups(lease.ids)

    async def groups(self, ids: Sequence[str]) -> list[m.Group]:
        """These groups, as they are stored."""
        blobs: list[Any] = await self.redis.mget([group_key(self.config.run.name, group_id) for group_id in ids])
        return [codec.decode_group(blob) for blob in blobs]


async def no_restart() -> Engine:
    raise EngineError("no memory")


async def wait_for(met: Callable[[], Awaitable[bool]], state: Callable[[], object]) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await met():
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"not within {DEADLINE_S:g} s; at last: {state()}")


@asynccontextmanager
async def cancelled_after(work: Any) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        while not task.done():  # wait_for of Python 3.11, which redis-py sends with, may swallow one
            task.cancel()
            await asyncio.wait([task], timeout=1.0)
    if not task.cancelled():
        task.result()


@pytest_asyncio.fixture(loop_scope="module")
async def make_run(
    model: Path, redis_url: str, run_name: str, free_address: str, tmp_path: Path
) -> AsyncIterator[Callable[..., Run]]:
    client = Redis.from_url(redis_url, socket_timeout=10.0)

    def make(**changes: Any) -> Run:
        settings = SETTINGS | {
            "run": {"name": run_name, "dir": tmp_path},
            "model": {"path": model, "dtype": "float32"},
            "redis": {"url": redis_url},
            "buffer": SETTINGS["buffer"] | {"bind": free_address, "endpoint": free_address},
            "weights": SETTINGS["weights"] | {"control_port": free_port()},
        }
        config = RunConfig.model_validate(settings | changes)
        return Run(config, client, Ledger.from_config(client, config))

    yield make
    await client.aclose()


MakeRun = Callable[..., Run]


async def test_tickets_become_ready_groups(vllm: Engine, make_run: MakeRun) -> None:
    run = make_run()
    async with run.buffer(), cancelled_after(run.server(vllm).run()):
        counts = await run.until(lambda counts: counts.ready == CAPACITY)
    assert (counts.issued, counts.in_flight, counts.filtered) == (CAPACITY, 0, 0)

    env, text = build_env(run.config.env), Tokenizer(run.config.model.path or Path())
    groups = await run.ready_groups()
    assert len({group.indices[0] for group in groups}) == CAPACITY
    for group in groups:
        task = env.task("train", group.indices[0])
        assert len(group.trajectories) == 4
        for trajectory in group.trajectories:
            ids, chosen = codec.token_ids(trajectory), codec.action_mask(trajectory).astype(bool)
            answer = text.decode([ids[chosen].tolist()])[0]
            assert text.decode([ids[~chosen].tolist()]) == [task.prompt]
            assert trajectory.reward == pytest.approx(
                sum(a == b for a, b in zip(answer, task.reference, strict=False)) / len(task.reference)
            )
            assert [(span.version, span.end - span.start) for span in trajectory.spans] == [(0, 3)]
            assert (codec.behaviour_logprobs(trajectory)[chosen] < 0).all()


async def test_a_faulty_task_is_filtered_with_its_reason(vllm: Engine, make_run: MakeRun) -> None:
    run = make_run(env={"name": f"{PLUGINS}:Faulty"}, rewards=[{"name": f"{PLUGINS}:raises_for_99r"}])
    async with run.buffer(), cancelled_after(run.server(vllm).run()):
        counts = await run.until(lambda counts: counts.ready == CAPACITY)
    assert {reason for reason in counts.reasons if counts.reasons[reason]} == {
        f"filtered:{reason}" for reason in FAULTY_PROMPTS
    }
    assert counts.issued == counts.ready + counts.filtered + counts.in_flight
    assert {group.indices[0] for group in await run.ready_groups()} == {0}


async def evaluated(run: Run, engine: Engine) -> m.EvalReport:
    """The evaluation of version 0, by one server."""
    context = zmq.asyncio.Context()
    learner = connect_dealer(context, run.config.buffer.endpoint, identity="learner")
    reports: list[m.EvalReport] = []

    async def request(message: m.Message) -> bool:
        await learner.send(codec.encode(message))
        reports.extend(codec.decode(await learner.recv(), m.State).evals)
        return bool(reports)

    try:
        async with run.buffer() as service, cancelled_after(run.server(engine).run()):
            await run.until(lambda counts: counts.issued > 0)
            await request(m.LearnerHello(request=1, incarnation="a1", run=run.config.run.name, step=0))
            await request(m.Published(request=2, incarnation="a1", version=0, evaluate=True))
            await wait_for(lambda: request(m.StateRequest(request=3)), lambda: service.fleet.servers)
    finally:
        context.destroy(linger=0)
    (report,) = reports
    return report


async def test_held_out_tasks_are_evaluated_and_reported(vllm: Engine, make_run: MakeRun) -> None:
    run = make_run(eval={"tasks": 100, "reward": "digit_match"})
    report = await evaluated(run, vllm)
    assert (report.version, report.tasks, report.failed) == (0, 100, 0)
    groups = await run.groups(report.group_ids)
    rewards = [trajectory.reward for group in groups for trajectory in group.trajectories]
    assert report.score == pytest.approx(sum(rewards) / 100)
    assert sorted(index for group in groups for index in group.indices) == list(range(100))


async def test_failed_held_out_tasks_fail_no_others(vllm: Engine, make_run: MakeRun) -> None:
    reward = f"{PLUGINS}:raises_for_99r"
    run = make_run(env={"name": f"{PLUGINS}:Faulty"}, rewards=[{"name": reward}], eval={"tasks": 4, "reward": reward})
    report = await evaluated(run, vllm)
    assert (report.tasks, report.failed, report.score) == (1, len(FAULTY_PROMPTS), 1.0)


async def test_a_server_of_another_run_is_refused(vllm: Engine, make_run: MakeRun) -> None:
    run = make_run()
    async with run.buffer(), asyncio.timeout(DEADLINE_S):
        with pytest.raises(RefusedError, match="'another'"):
            await run.server(vllm, run={"name": "another"}).run()


async def test_buffer_with_another_temperature_ends_but_no_server(make_run: MakeRun) -> None:
    run = make_run()
    serving = asyncio.create_task(run.server(ScriptedEngine()).run())
    async with run.buffer() as service:
        await wait_for(lambda: has_joined(service), lambda: service.fleet.servers)
    known = run.config.model_dump()
    sampling = known["rollout"]["sampling"] | {"temperature": 0.5}
    run.config = RunConfig.model_validate(known | {"rollout": known["rollout"] | {"sampling": sampling}})
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.temperature is '1\.0', but '0\.5'"):
        async with asyncio.timeout(DEADLINE_S):
            await serve(run.config)
    assert not serving.done()
    serving.cancel()
    await asyncio.wait([serving])


async def has_joined(service: BufferService) -> bool:
    return bool(service.fleet.servers)


async def test_a_restarted_buffer_gets_every_group(vllm: Engine, make_run: MakeRun) -> None:
    run = make_run()
    async with cancelled_after(run.server(vllm).run()):
        async with run.buffer() as service:

            async def has_tickets() -> bool:
                heard = [server.credits.held for server in service.fleet.servers.values() if server.credits]
                return any(heard) or (await run.ledger.counts()).ready > 0

            await wait_for(has_tickets, lambda: service.fleet.servers)
        async with run.buffer() as service:
            counts = await run.until(lambda counts: counts.ready == CAPACITY)
            assert counts.issued == CAPACITY, "nothing was generated twice"
            await run.ready_groups()
            await run.ledger.train(1)
            await run.ledger.publish(1, evaluate=False)
            await run.until(lambda counts: counts.ready > 0)
            assert list(service.fleet.servers) == [b"server-1"]


async def test_repeated_engine_crashes_end_the_server(make_run: MakeRun) -> None:
    run = make_run(rollout=SETTINGS["rollout"] | {"engine": {"give_up_after": 2}})
    engine = ScriptedEngine(failure=EngineError("vLLM died: out of memory"))
    async with run.buffer(), asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineError, match=r"2 times.*out of memory; no memory"):
            await run.server(engine).run()
