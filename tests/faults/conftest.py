"""A scripted run for every test, and the digits model."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from slipstream.configs import RunConfig
from tests.buffer.conftest import make_config, redis
from tests.conftest import free_port
from tests.faults.own_redis import OwnRedis
from tests.faults.scripted_run import SETTINGS
from tests.rollout_servers.conftest import model

__all__ = ["make_config", "model", "redis"]

MakeRunConfig = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short retry intervals, so that hundreds of losses take seconds."""
    monkeypatch.setattr("slipstream.buffer.client.RESEND_S", 0.3)
    monkeypatch.setattr("slipstream.buffer.handlers.fleet.GRACE_S", 0.5)
    monkeypatch.setattr("slipstream.rollout_servers.server.HEARTBEAT_S", 0.2)


@pytest.fixture
def make_run_config(redis_url: str, run_name: str, free_address: str, tmp_path: Path) -> MakeRunConfig:
    """A scripted run on the session's Redis; keyword arguments replace sections."""

    def make(*, buffer: dict[str, object] | None = None, **sections: dict[str, object]) -> RunConfig:
        return RunConfig.model_validate(
            SETTINGS
            | {
                "run": {"name": run_name, "dir": str(tmp_path)}, "redis": {"url": redis_url},
                "weights": {"control_port": free_port()},
                "buffer": {
                    "bind": free_address, "endpoint": free_address, "max_staleness": 4, "reply_deadline_s": 60.0,
                    "retention": {"max_groups": 100_000}, **(buffer or {}),
                },
            }
            | sections
        )  # fmt: skip

    return make


@pytest.fixture
def own_config(make_run_config: MakeRunConfig) -> RunConfig:
    """A scripted run with its own Redis."""
    return make_run_config(redis={"port": free_port(), "deadline_s": 1.0, "outage_deadline_s": 120.0})


@pytest.fixture
def own_redis(own_config: RunConfig) -> Iterator[OwnRedis]:
    """That Redis, running."""
    with OwnRedis(own_config) as server:
        yield server


@pytest.fixture
async def own_client(own_config: RunConfig, own_redis: OwnRedis) -> AsyncIterator[Redis]:
    """A connection to it."""
    client = Redis.from_url(own_config.redis.address, socket_timeout=10.0)
    yield client
    await client.aclose()
