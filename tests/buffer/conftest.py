"""A run for every test: ledger and configuration, on the session's Redis."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis as SyncRedis
from redis.asyncio import Redis

from slipstream.buffer.service import BufferService
from slipstream.buffer.store.ledger import Ledger
from slipstream.configs import RunConfig
from tests.buffer.ledger import ledger
from tests.buffer.peers import Peer, connected, serving

MakeConfig = Callable[..., RunConfig]


@pytest.fixture(scope="module", autouse=True)
def _keys_of_one_module(redis_url: str) -> Iterator[None]:
    """Removes all keys after a module: scans for those of one run read all."""
    yield
    with SyncRedis.from_url(redis_url) as client:
        client.flushdb()


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_url, socket_timeout=10.0)
    yield client
    await client.aclose()


@pytest.fixture
def store(redis: Redis, run_name: str) -> Ledger:
    return ledger(redis, run_name)


@pytest.fixture
def make_config(redis_url: str, run_name: str, free_address: str, tmp_path: Path) -> MakeConfig:
    """A small run's configuration; keyword arguments replace settings of `buffer`."""

    def make(**buffer: object) -> RunConfig:
        return RunConfig.model_validate(
            {
                "run": {"name": run_name, "dir": str(tmp_path)}, "model": {"build": "digits"},
                "redis": {"url": redis_url}, "rollout": {"group_size": 2}, "learner": {"groups_per_step": 4},
                "eval": {"tasks": 100},
                "buffer": {
                    "bind": free_address, "endpoint": free_address, "max_staleness": 1, "reply_deadline_s": 10.0,
                    **buffer,
                },
            }
        )  # fmt: skip

    return make


@pytest.fixture
def config(make_config: MakeConfig) -> RunConfig:
    return make_config()


@pytest.fixture
async def service(config: RunConfig) -> AsyncIterator[BufferService]:
    async with serving(config) as running:
        yield running


@pytest.fixture
async def server(config: RunConfig, service: BufferService) -> AsyncIterator[Peer]:
    """A rollout server that has sent nothing yet."""
    async with connected(config) as peer:
        yield peer
