"""The embedded Redis-protocol server."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import redis

from slipstream.buffer.store.scripts import group_key, run_prefix
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import DeadlineError, SlipstreamError
from slipstream.configs.runtime.signals import StopSignals
from slipstream.tools.launch.redis import forget_run, ping_problem, redis_command, wait_until_ready
from slipstream.tools.launch.supervise import Supervisor
from tests.conftest import free_port


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "kept", "dir": str(tmp_path)},
            "model": {"build": "digits"},
            "redis": {"port": free_port(), "fsync": "always"},
        }
    )


@pytest.fixture
def server(config: RunConfig, tmp_path: Path) -> Iterator[redis.Redis]:
    with StopSignals() as signals, Supervisor(tmp_path, signals) as supervisor:
        child = supervisor.start("redis", redis_command(config.redis, config.paths.redis))
        wait_until_ready(config.redis, 60)
        with redis.Redis.from_url(config.redis.address, decode_responses=True) as client:
            yield client
        supervisor.stop("redis")
        child.process.wait(60)  # its first thread has ended; the others may take a moment


def test_server_is_durable_never_evicts_and_is_local(server: redis.Redis, config: RunConfig) -> None:
    expected = {
        "appendonly": "yes", "appendfsync": "always", "save": "", "maxmemory-policy": "noeviction",
        "auto-aof-rewrite-min-size": str(512 << 20), "rdbcompression": "no",
        "bind": "127.0.0.1", "dir": str(config.paths.redis),
    }  # fmt: skip
    assert server.config_get(*expected) == expected


def test_data_survives_a_restart(config: RunConfig, tmp_path: Path) -> None:
    for _ in range(2):
        with StopSignals() as signals, Supervisor(tmp_path, signals) as supervisor:
            child = supervisor.start("redis", redis_command(config.redis, config.paths.redis))
            wait_until_ready(config.redis, 60)
            with redis.Redis.from_url(config.redis.address) as client:
                starts = client.incr("starts")
        child.process.wait(60)
    assert starts == 2


def test_missing_server_is_named_at_the_deadline(config: RunConfig) -> None:
    assert ping_problem(config.redis)
    with pytest.raises(DeadlineError, match=f"127.0.0.1:{config.redis.port}.* 0.1 s"):
        wait_until_ready(config.redis, 0.1)


def test_forget_run_spares_other_runs(server: redis.Redis, config: RunConfig) -> None:
    for run in ("gone", "gone.2", "kept"):
        server.set(group_key(run, "g1"), "bytes")
    assert forget_run(config.redis, "gone", silent_s=10.0) == 1
    assert sorted(server.scan_iter()) == sorted(group_key(run, "g1") for run in ("gone.2", "kept"))


@pytest.mark.parametrize(("silence_s", "running"), [(3, True), (30, False)])
def test_run_with_active_servers_is_not_forgotten(
    server: redis.Redis, config: RunConfig, silence_s: int, running: bool
) -> None:
    now_s, _ = server.time()
    key = f"{run_prefix('mine')}:heard"
    server.zadd(key, {"dead": now_s - 1000, "late": now_s - silence_s})
    with pytest.raises(SlipstreamError, match=r"'mine' .* [34] s") if running else nullcontext():
        assert forget_run(config.redis, "mine", silent_s=10.0) == 1
    assert bool(server.exists(key)) == running
