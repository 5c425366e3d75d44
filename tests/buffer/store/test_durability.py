"""Durability of Redis: eviction, append-only file, lost ledger."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import structlog
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, ResponseError

from slipstream.buffer.handlers.fleet import Fleet
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import run_prefix
from slipstream.buffer.store.server_checks import require_durable
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.buffer import RedisConfig
from slipstream.tools.launch.redis import redis_command
from tests.buffer.conftest import MakeConfig
from tests.buffer.ledger import ready
from tests.buffer.peers import PATIENCE_S, connected, serving, until
from tests.conftest import embedded_redis, free_port

COMMANDS = 300_000
"""Commands in the file; at a fifth of a millisecond each, the server is still loading when the test ends."""


@pytest.fixture(scope="module")
def own_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose settings may be changed."""
    with embedded_redis(tmp_path_factory.mktemp("own")) as url:
        yield url


@pytest.fixture
async def own(own_url: str) -> AsyncIterator[Redis]:
    client = Redis.from_url(own_url, socket_timeout=10.0)
    yield client
    await client.config_set("maxmemory-policy", "noeviction")
    await client.config_set("appendonly", "yes")
    await client.config_set("maxmemory", 0)
    await client.config_set("aof-load-truncated", "no")
    await client.aclose()


@pytest.fixture
def own_config(own_url: str, make_config: MakeConfig) -> RunConfig:
    config = make_config()
    return config.model_copy(update={"redis": config.redis.model_copy(update={"url": own_url})})


async def test_evicting_server_is_refused(own: Redis, own_config: RunConfig) -> None:
    await own.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match=r"allkeys-lru.*maxmemory-policy"):
        async with serving(own_config) as service, asyncio.timeout(PATIENCE_S):
            await service.run()


async def test_server_with_too_little_memory_is_refused(own: Redis, own_config: RunConfig) -> None:
    await own.config_set("maxmemory", 10**7)
    keys = r"max_tokens=1024.*group_size=2.*every_steps=100.*max_groups=1000"
    with pytest.raises(ConfigError, match=rf"maxmemory of 0.01 GB .*{keys}"):
        async with serving(own_config) as service, asyncio.timeout(PATIENCE_S):
            await service.run()


@pytest.mark.parametrize(("setting", "value"), [("appendonly", "no"), ("aof-load-truncated", "yes")])
async def test_server_that_loses_ledger_is_warned_about(own: Redis, setting: str, value: str) -> None:
    with structlog.testing.capture_logs() as logs:
        await require_durable(own, "redis://here")
        assert not logs, "the embedded server is safe"
        await own.config_set(setting, value)
        await require_durable(own, "redis://here")
    assert setting in logs[0]["event"]
    assert [(each["log_level"], each["redis"]) for each in logs] == [("warning", "redis://here")]


async def test_loading_server_is_waited_for(make_config: MakeConfig) -> None:
    config = make_config().model_copy(update={"redis": RedisConfig(port=free_port())})
    command = [*redis_command(config.redis, config.paths.redis), "--key-load-delay", "200"]
    (config.paths.redis / "appendonly.aof").write_bytes(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n" * COMMANDS)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        async with Redis(port=config.redis.port) as client:
            await until(lambda: loads(client))
        with structlog.testing.capture_logs() as logs:
            async with serving(config):
                await until(lambda: is_logged(logs))
        process.kill()
    assert [each["event"] for each in logs if each["log_level"] == "warning"] == ["waiting for Redis"]
    assert "loading" in logs[-1]["error"]


async def is_logged(logs: Sequence[object]) -> bool:
    return bool(logs)


async def loads(client: Redis) -> bool:
    try:
        return bool((await client.info())["loading"])
    except ConnectionError:
        return False


@pytest.mark.parametrize("error", [None, "unknown command 'INFO', with args beginning with:"])
async def test_server_without_info_is_accepted(
    own: Redis, own_url: str, monkeypatch: pytest.MonkeyPatch, error: str | None
) -> None:
    async def info() -> None:
        raise ResponseError(error)

    await own.acl_setuser("limited", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-info"])
    async with Redis.from_url(own_url.replace("://", "://limited@"), password="any") as limited:
        if error:
            monkeypatch.setattr(limited, "info", info)
        with structlog.testing.capture_logs() as logs:
            await require_durable(limited, own_url)
    assert [line["log_level"] for line in logs] == ["info"]


async def test_documented_acl_is_sufficient(own: Redis, own_config: RunConfig) -> None:
    words = (Path(__file__).parents[3] / "docs" / "security.md").read_text(encoding="utf-8")
    rule = next(line for line in words.splitlines() if line.startswith("ACL SETUSER"))
    keys, *rights = rule.split(" on >PASSWORD ~")[1].replace("NAME", own_config.run.name).split()
    await own.acl_setuser("user", enabled=True, nopass=True, reset=True, keys=[keys], commands=rights)
    url = own_config.redis.address.replace("://", "://user@")
    config = own_config.model_copy(update={"redis": own_config.redis.model_copy(update={"url": url})})
    async with serving(config) as service, connected(config) as peer:
        await peer.join(credits=1)
        assert len(await peer.tickets()) == 1
        assert await service.ledger.verify() == []


async def test_damaged_ledger_is_logged_at_start(config: RunConfig, redis: Redis) -> None:
    async with serving(config) as service, connected(config) as server:
        await server.join(credits=1)
        (ticket,) = await server.tickets()
        await redis.zrem(f"{run_prefix(config.run.name)}:issued", ticket.id)
        with structlog.testing.capture_logs() as logs:
            await service._verify()
        assert [(each["log_level"], each["event"]) for each in logs] == [("error", "the ledger is damaged")]
        assert logs[0]["problems"] == len(await service.ledger.verify())


@pytest.mark.parametrize(("most", "checked"), [(-1, True), (1, True), (0, False)])
async def test_large_ledger_is_not_verified(store: Ledger, redis: Redis, most: int, checked: bool) -> None:
    await ready(store, 1)
    await redis.hset(f"{store._prefix}:about:1", "state", "leased")
    assert bool(await store.verify(most=most)) == checked


async def test_lost_ledger_is_logged_and_recreated(config: RunConfig, redis: Redis) -> None:
    async with serving(config) as service, connected(config) as server:
        await server.join(credits=1)
        before = await server.tickets()
        known = await service.ledger.identity()
        with structlog.testing.capture_logs() as logs:
            keys = [key async for key in redis.scan_iter(f"{run_prefix(config.run.name)}*")]
            await redis.delete(*keys)
            await until(lambda: is_forgotten(service.fleet))  # after the new ledger is identified
            await server.credits(1)
            await server.receive(m.UnknownPeer)
            await server.join(credits=1)
        assert await server.tickets() == before, "the task order starts again"
        assert await service.ledger.identity() == known
        assert "lost" in next(each["event"] for each in logs if each["log_level"] == "error")


async def is_forgotten(fleet: Fleet) -> bool:
    return not fleet.servers
