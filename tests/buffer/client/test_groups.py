"""Reading of leased groups."""

import threading
import time

import pytest
import redis
import structlog

from slipstream.buffer.client import GroupReader
from slipstream.buffer.store.redis import group_key
from slipstream.buffer.wire.codec import encode
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import SlipstreamError, StoppedError
from tests.buffer.groups import train_group
from tests.conftest import free_port


def test_groups_are_read_in_order_of_ids(config: RunConfig, redis_url: str) -> None:
    groups = [train_group("1"), train_group("2", versions=(3, 4))]
    with redis.Redis.from_url(redis_url) as server:
        for group in groups:
            server.set(group_key(config.run.name, group.id), encode(group))
    assert GroupReader(config.redis, run=config.run.name).read(["2", "1", "2"]) == [groups[1], groups[0], groups[1]]
    assert GroupReader(config.redis, run=config.run.name).read([]) == []


def test_missing_groups_are_named(config: RunConfig, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as server:
        server.set(group_key(config.run.name, "2"), encode(train_group("2")))
    with pytest.raises(SlipstreamError, match=r"groups 1, 3 .*redis.url"):
        GroupReader(config.redis, run=config.run.name).read(["1", "2", "3"])


def test_give_up_ends_wait_for_redis(config: RunConfig) -> None:
    away = config.redis.model_copy(update={"url": f"redis://127.0.0.1:{free_port()}/0"})
    reader = GroupReader(away, run=config.run.name)
    failures: list[StoppedError] = []

    def read() -> None:
        with pytest.raises(StoppedError) as failure:
            reader.read(["1"])
        failures.append(failure.value)

    with structlog.testing.capture_logs() as logs:
        reading = threading.Thread(target=read)
        reading.start()
        while not logs:
            assert reading.is_alive()
            time.sleep(0.01)
        reader.give_up()
        reading.join(10)
    assert logs[0]["event"] == "waiting for Redis"
    assert "given up" in str(failures[0])
