"""A Redis that doesn't keep what it is given is refused, warned about, or noticed when it has lost the ledger."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import structlog
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, ResponseError

from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import require_durable
from slipstream.buffer.store.scripts import run_prefix
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.buffer import RedisConfig
from slipstream.tools.launch.redis import redis_command
from tests.buffer.conftest import MakeConfig
from tests.buffer.peers import PATIENCE_S, connected, serving, until
from tests.conftest import embedded_redis, free_port

COMMANDS = 300_000
"""In the file of a server that takes a fifth of a millisecond for each: nobody waits until it has read them all."""


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
    await client.aclose()


@pytest.fixture
def own_config(own_url: str, make_config: MakeConfig) -> RunConfig:
    config = make_config()
    return config.model_copy(update={"redis": config.redis.model_copy(update={"url": own_url})})


async def test_evicting_server_is_refused(own: Redis, own_config: RunConfig) -> None:
    await own.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match=r"allkeys-lru.*set its maxmemory-policy to noeviction"):
        async with serving(own_config) as service, asyncio.timeout(PATIENCE_S):
            await service.run()


async def test_server_without_aof_is_warned_about(own: Redis) -> None:
    with structlog.testing.capture_logs() as said:
        await require_durable(own, "redis://here")
        assert not said, "the embedded one keeps its file"
        await own.config_set("appendonly", "no")
        await require_durable(own, "redis://here")
    assert [(each["log_level"], each["redis"]) for each in said] == [("warning", "redis://here")]


async def test_loading_server_is_waited_for(
    make_config: MakeConfig,
) -> None:
    config = make_config().model_copy(update={"redis": RedisConfig(port=free_port())})
    command = [*redis_command(config.redis, config.paths.redis), "--key-load-delay", "200"]
    (config.paths.redis / "appendonly.aof").write_bytes(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n" * COMMANDS)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        async with Redis(port=config.redis.port) as client:
            await until(lambda: loads(client))
        with structlog.testing.capture_logs() as said:
            async with serving(config):
                await until(lambda: has_said(said))
        process.kill()
    assert [each["event"] for each in said if each["log_level"] == "warning"] == ["waiting for Redis"]
    assert "loading" in said[-1]["error"]


async def has_said(said: Sequence[object]) -> bool:
    return bool(said)


async def loads(client: Redis) -> bool:
    try:
        return bool((await client.info())["loading"])
    except ConnectionError:
        return False


async def test_server_without_info_permission_is_accepted(own: Redis, own_url: str) -> None:
    await own.acl_setuser("curt", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-info"])
    async with Redis.from_url(own_url.replace("://", "://curt@"), password="any") as curt:
        with structlog.testing.capture_logs() as said:
            await require_durable(curt, own_url)
    assert [each["log_level"] for each in said] == ["info"]


async def test_server_without_info_command_is_accepted(own: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    async def info() -> None:
        raise ResponseError("unknown command 'INFO', with args beginning with:")

    monkeypatch.setattr(own, "info", info)
    with structlog.testing.capture_logs() as said:
        await require_durable(own, "redis://here")
    assert [each["log_level"] for each in said] == ["info"]


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


async def test_lost_ledger_is_logged_and_recreated(config: RunConfig, redis: Redis) -> None:
    async with serving(config) as service, connected(config) as server:
        await server.join(credits=1)
        before = await server.tickets()
        known = await service.ledger.identity()
        with structlog.testing.capture_logs() as said:
            keys = [key async for key in redis.scan_iter(f"{run_prefix(config.run.name)}*")]
            await redis.delete(*keys)
            await until(lambda: is_known(service.ledger))
            await server.credits(1)
            await server.receive(m.UnknownPeer)
            await server.join(credits=1)
        assert await server.tickets() == before, "from the first task on"
        assert await service.ledger.identity() == known
        assert "lost the run's ledger" in next(each["event"] for each in said if each["log_level"] == "error")


async def is_known(ledger: Ledger) -> bool:
    return bool(await ledger.identity())
