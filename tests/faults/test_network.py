"""Network faults between rollout server, learner and buffer: the run completes and trains every group once."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from slipstream.buffer.store.ledger import Ledger
from slipstream.configs import RunConfig
from slipstream.rollout_servers.engines.base import Completion, Request
from tests.buffer.peers import until
from tests.conftest import free_port
from tests.faults.accounting import assert_accounted_for
from tests.faults.conftest import MakeRunConfig
from tests.faults.proxy import MessageProxy, TcpProxy
from tests.faults.scripted_run import ANSWER, SETTINGS, STEPS, FollowingEngine, scripted_run

DEADLINE_S = 90.0
SILENCE_S = 2.5
SLOW_BYTES_PER_S = 120_000.0
pytestmark = [pytest.mark.timeout(150), pytest.mark.usefixtures("short_retries")]


@pytest.fixture
def bind_port() -> int:
    """The service's port, behind the proxy."""
    return free_port()


@pytest.fixture
def config(make_run_config: MakeRunConfig, bind_port: int) -> RunConfig:
    """A run whose peers reach the service through a proxy."""
    return make_run_config(buffer={"bind": f"tcp://127.0.0.1:{bind_port}"})


async def test_message_faults_lose_and_repeat_no_group(config: RunConfig, redis: Redis, model: Path) -> None:
    proxy = MessageProxy(random.Random(1), drop=0.03, repeat=0.05, truncate=0.02, late_s=1.0)
    async with (
        proxy.running(listen=config.buffer.endpoint, to=config.buffer.bind),
        scripted_run(config, model) as learner,
    ):
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.to_thread(learner.run)
    assert min(proxy.faults.values()) >= 5, proxy.faults
    assert await assert_accounted_for(redis, config, steps=STEPS) == learner.trained


async def test_connection_faults_lose_no_group(config: RunConfig, redis: Redis, model: Path, bind_port: int) -> None:
    rng, proxy = random.Random(4), TcpProxy()
    endpoint_port = int(config.buffer.endpoint.rpartition(":")[2])
    async with proxy.running(listen=endpoint_port, to=bind_port), scripted_run(config, model) as learner:
        async with asyncio.timeout(DEADLINE_S):
            training = asyncio.create_task(asyncio.to_thread(learner.run))
            for at_step in range(3, STEPS, 6):
                while learner.step < at_step and not training.done():
                    await asyncio.sleep(0.01)
                await inject_fault(proxy, rng)
            await training
    assert proxy.connections > 6
    assert await assert_accounted_for(redis, config, steps=STEPS) == learner.trained


class IncompressibleEngine(FollowingEngine):
    """Long answers with random log-probs."""

    answer = ANSWER * 2000

    async def generate(self, request: Request) -> list[Completion]:
        rng = random.Random(0)
        return [
            replace(completion, logprobs=[-rng.random() for _ in completion.token_ids])
            for completion in await super().generate(request)
        ]


async def test_slow_network_is_not_a_silent_server(
    make_run_config: MakeRunConfig, redis: Redis, model: Path, bind_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.handlers.fleet.GRACE_S", 5.0)  # messages are late, not lost
    tokens = len(IncompressibleEngine.answer)
    config = make_run_config(
        buffer={"bind": f"tcp://127.0.0.1:{bind_port}", "server_deadline_s": SILENCE_S},
        rollout=SETTINGS["rollout"] | {"sampling": {"max_tokens": tokens}, "engine": {"max_model_len": tokens + 10}},
    )
    engine = IncompressibleEngine()
    proxy = TcpProxy(bytes_per_s=SLOW_BYTES_PER_S)
    ledger = Ledger(redis, config)
    endpoint_port = int(config.buffer.endpoint.rpartition(":")[2])
    async with proxy.running(listen=endpoint_port, to=bind_port), scripted_run(config, model, engine):

        async def all_are_ready() -> bool:
            return (await ledger.counts()).ready == (config.buffer.max_staleness + 1) * config.learner.groups_per_step

        await until(all_are_ready)
    assert (await ledger.counts()).reissued == 0
    assert proxy.passed_bytes > 2 * SILENCE_S * SLOW_BYTES_PER_S


async def inject_fault(proxy: TcpProxy, rng: random.Random) -> None:
    """One of: cut connections; a black hole that delivers late, or never; delay."""
    proxy.delay_s = 0.0
    match rng.randrange(4):
        case 0:
            proxy.cut()
        case 1:
            proxy.begin_black_hole()
            await asyncio.sleep(rng.uniform(0.2, 1.0))
            proxy.end_black_hole()
        case 2:
            proxy.begin_black_hole()
            await asyncio.sleep(rng.uniform(0.2, 1.0))
            proxy.cut()
            proxy.end_black_hole()
        case 3:
            proxy.delay_s = rng.uniform(0.0, 0.05)
