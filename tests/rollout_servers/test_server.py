"""A rollout server with an engine, against the real buffer service on a real Redis-protocol server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from slipstream.buffer.cli import serve
from slipstream.buffer.client import GroupReader
from slipstream.buffer.service import BufferService
from slipstream.buffer.wire import codec
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.env.registry import build_env
from slipstream.models.tokenizer import Tokenizer
from slipstream.rollout_servers.engines.base import Engine, EngineError
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.engines.supervisor import RestartingEngine
from slipstream.rollout_servers.server import EveryTaskFails, RolloutServer
from slipstream.rollout_servers.tickets import FIRST_GROUPS
from tests.buffer.peers import learner, serving, until
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
        "engine": {"name": "hf", "max_model_len": 32, "max_sequences": 64},
    },
    "learner": {"groups_per_step": 4, "updates_per_step": 1},
    "weights": {"transport": "gloo"},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[Engine]:
    config = RunConfig.model_validate(SETTINGS | {"model": {"path": model, "dtype": "float32"}})
    engine = await start_engine(config, model, eos_token_ids=())
    yield engine
    await engine.close()


MakeRun = Callable[..., RunConfig]


@pytest.fixture
def make_run(model: Path, redis_url: str, run_name: str, free_address: str, tmp_path: Path) -> MakeRun:
    """Makes the configuration of a run with other sections than SETTINGS."""

    def make(**changes: Any) -> RunConfig:
        own = {
            "run": {"name": run_name, "dir": tmp_path},
            "model": {"path": model, "dtype": "float32"},
            "redis": {"url": redis_url},
            "buffer": SETTINGS["buffer"] | {"bind": free_address, "endpoint": free_address},
            "weights": SETTINGS["weights"] | {"control_port": free_port()},
        }
        return RunConfig.model_validate(SETTINGS | own | changes)

    return make


def build_server(config: RunConfig, engine: Engine, **changes: Any) -> RolloutServer:
    """A rollout server of a run, or of one that differs from it."""
    config = RunConfig.model_validate(config.model_dump() | changes)
    assert config.model.path is not None, "set in the fixture"
    lasting = RestartingEngine(engine, no_restart, config.rollout)
    return RolloutServer(config, "server-1", build_player(config, config.model.path, lasting), lasting)


async def no_restart() -> Engine:
    raise EngineError("no memory")


@asynccontextmanager
async def generating(config: RunConfig, engine: Engine) -> AsyncIterator["asyncio.Task[None]"]:
    """A server of the run that runs."""
    running = asyncio.create_task(build_server(config, engine).run())
    yield running
    running.cancel()
    await asyncio.wait([running])
    if not running.cancelled():
        running.result()


async def counted(service: BufferService, met: Callable[[m.LedgerCounts], bool]) -> m.LedgerCounts:
    """The ledger's counts, once they meet a condition."""

    async def look() -> bool:
        return met(await service.ledger.counts())

    await until(look)
    return await service.ledger.counts()


async def ready_groups(config: RunConfig, service: BufferService) -> list[m.Group]:
    """All ready groups, leased for step 1."""
    counts = await service.ledger.counts()
    lease = await service.ledger.lease(1, consuming_version=0, count=counts.ready)
    assert lease is not None, "that many were ready"
    return GroupReader(config.redis, run=config.run.name).read(lease.ids)


async def test_tickets_become_ready_groups(engine: Engine, make_run: MakeRun) -> None:
    config = make_run()
    async with serving(config) as service, generating(config, engine):
        counts = await counted(service, lambda counts: counts.ready == CAPACITY)
        groups = await ready_groups(config, service)
    assert (counts.issued, counts.in_flight, counts.filtered) == (CAPACITY, 0, 0)
    env, text = build_env(config.env), Tokenizer(config.model.path or Path())
    assert len({group.indices[0] for group in groups}) == CAPACITY
    for group in groups:
        task = env.task("train", group.indices[0])
        assert len(group.trajectories) == 4
        for trajectory in group.trajectories:
            ids, chosen = codec.token_ids(trajectory), codec.action_mask(trajectory).astype(bool)
            answer = text.decode([ids[chosen].tolist()])[0]
            assert text.decode([ids[~chosen].tolist()]) == [task.prompt]
            right = sum(a == b for a, b in zip(answer, task.reference, strict=False))
            assert trajectory.reward == pytest.approx(right / len(task.reference))
            assert [(span.version, span.end - span.start) for span in trajectory.spans] == [(0, 3)]
            assert (codec.behaviour_logprobs(trajectory)[chosen] < 0).all()


async def test_a_faulty_task_is_filtered_with_its_reason(engine: Engine, make_run: MakeRun) -> None:
    config = make_run(env={"name": f"{PLUGINS}:Faulty"}, rewards=[{"name": f"{PLUGINS}:raises_for_99r"}])
    async with serving(config) as service, generating(config, engine):
        counts = await counted(service, lambda counts: counts.ready == CAPACITY)
        groups = await ready_groups(config, service)
    assert {reason for reason, number in counts.reasons.items() if number} == {
        f"filtered:{reason}" for reason in FAULTY_PROMPTS
    }
    assert counts.issued == counts.ready + counts.filtered + counts.in_flight
    assert {group.indices[0] for group in groups} == {0}


async def test_failure_of_every_task_ends_the_server(make_run: MakeRun) -> None:
    config = make_run(env={"name": f"{PLUGINS}:Chat"})
    async with serving(config), asyncio.timeout(DEADLINE_S):
        with pytest.raises(EveryTaskFails, match=r"prompt_untokenizable.*no chat template.*slipstream check"):
            await build_server(config, ScriptedEngine()).run()


async def test_mixture_with_few_sound_tasks_goes_on(engine: Engine, make_run: MakeRun) -> None:
    config = make_run(env={"name": f"{PLUGINS}:Chat", "options": {"texts": 2}})
    async with serving(config) as service, generating(config, engine):
        counts = await counted(service, lambda counts: counts.ready > 0 and counts.filtered > FIRST_GROUPS)
    assert counts.reasons["filtered:prompt_untokenizable"] == counts.filtered


async def evaluated(config: RunConfig, engine: Engine) -> tuple[m.EvalReport, list[m.Group]]:
    """The evaluation of version 0 by one server, and its answers."""
    reports = list[m.EvalReport]()
    async with serving(config) as service, generating(config, engine), learner(config) as client:

        async def look() -> bool:
            reports.extend((await asyncio.to_thread(client.state)).evals)
            return bool(reports)

        await counted(service, lambda counts: counts.issued > 0)
        await asyncio.to_thread(client.hello, 0)
        await asyncio.to_thread(client.published, 0, evaluate=True)
        await until(look)
        return reports[0], GroupReader(config.redis, run=config.run.name).read(reports[0].group_ids)


async def test_held_out_tasks_are_evaluated_and_reported(engine: Engine, make_run: MakeRun) -> None:
    report, groups = await evaluated(make_run(eval={"tasks": 100, "reward": "digit_match"}), engine)
    assert (report.version, report.tasks, report.failures) == (0, 100, {})
    rewards = [trajectory.reward for group in groups for trajectory in group.trajectories]
    assert report.score == pytest.approx(sum(rewards) / 100)
    assert sorted(index for group in groups for index in group.indices) == list(range(100))


async def test_failed_held_out_tasks_fail_no_others(engine: Engine, make_run: MakeRun) -> None:
    reward = f"{PLUGINS}:raises_for_99r"
    env, evaluation = {"name": f"{PLUGINS}:Faulty"}, {"tasks": 4, "reward": reward}
    report, _ = await evaluated(make_run(env=env, rewards=[{"name": reward}], eval=evaluation), engine)
    assert (report.tasks, report.score, report.failures) == (1, 1.0, dict.fromkeys(FAULTY_PROMPTS, 1))


async def test_buffer_with_another_temperature_ends_but_no_server(make_run: MakeRun) -> None:
    config = make_run()
    sampling = SETTINGS["rollout"]["sampling"] | {"temperature": 0.5}
    other = RunConfig.model_validate(config.model_dump() | {"rollout": SETTINGS["rollout"] | {"sampling": sampling}})
    async with generating(config, ScriptedEngine()) as running:
        async with serving(config) as service:
            await until(lambda: has_joined(service))
        with pytest.raises(ConfigError, match=r"rollout\.sampling\.temperature is '1\.0', but '0\.5'"):
            async with asyncio.timeout(DEADLINE_S):
                await serve(other)
        assert not running.done()


async def has_joined(service: BufferService) -> bool:
    return bool(service.fleet.servers)


async def test_a_restarted_buffer_gets_every_group(engine: Engine, make_run: MakeRun) -> None:
    config = make_run()
    async with generating(config, engine):
        async with serving(config) as service:
            await counted(service, lambda counts: counts.issued > 0)
        async with serving(config) as service:
            counts = await counted(service, lambda counts: counts.ready == CAPACITY)
            assert counts.issued == CAPACITY, "nothing was generated twice"
            await ready_groups(config, service)
            await service.ledger.train(1)
            await service.ledger.publish(1, evaluate=False)
            await counted(service, lambda counts: counts.ready > 0)
            assert list(service.fleet.servers) == [b"server-1"]


async def test_repeated_engine_crashes_end_the_server(make_run: MakeRun) -> None:
    config = make_run(rollout=SETTINGS["rollout"] | {"engine": {"give_up_after": 2}})
    engine = ScriptedEngine(failure=EngineError("vLLM died: out of memory"))
    async with serving(config), asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineError, match=r"2 times.*out of memory; no memory"):
            await build_server(config, engine).run()
