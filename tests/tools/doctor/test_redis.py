"""Checks of Redis, on a real server that is set rightly and wrongly."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import redis

from slipstream.configs import RunConfig
from slipstream.configs.load import load_config
from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE
from slipstream.tools.doctor.redis import eviction, memory, persistence, redis_findings, version
from tests.conftest import embedded_redis, free_port
from tests.tools.run_command import DEMO, demo_config

RIGHT = {
    "maxmemory": "0", "maxmemory-policy": "noeviction", "appendonly": "yes", "aof-load-truncated": "no",
    "appendfsync": "everysec", "requirepass": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def own_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose settings a test may change."""
    with embedded_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
def server(own_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(own_url) as client:
        yield client
        for key, value in RIGHT.items():
            client.config_set(key, value)


def verdicts(url: str, *overrides: str) -> dict[str, str]:
    found = list(redis_findings(load_config(DEMO, [f"redis.url={url}", *overrides])))
    assert all(bool(finding.remedy) == (finding.verdict != "ok") for finding in found)
    return {finding.check: finding.verdict for finding in found if finding.verdict != "ok"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"maxmemory-policy": "allkeys-lru"}, {"Redis eviction": "error"}),
        ({"maxmemory-policy": "volatile-lru"}, {}),
        ({"maxmemory": "3mb"}, {"Redis memory": "error"}),
        ({"appendonly": "no"}, {"Redis file": "warning"}),
        ({"aof-load-truncated": "yes"}, {"Redis file": "warning"}),
        ({"appendfsync": "no"}, {"Redis file": "warning"}),
        ({"requirepass": "sesame"}, {"Redis": "error"}),
    ],
)
def test_settings_of_a_server(
    settings: Mapping[str, str], expected: dict[str, str], server: redis.Redis, own_url: str
) -> None:
    for key, value in settings.items():
        server.config_set(key, value)
    assert verdicts(own_url) == expected


def test_open_server_beyond_loopback_is_warned_of(own_url: str) -> None:
    assert verdicts(own_url.replace("127.0.0.1", "127.1")) == {"Redis password": "warning"}


def test_password_is_used_and_not_printed(server: redis.Redis, own_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REDIS_PASSWORD_VARIABLE, "sesame")
    assert verdicts(own_url.replace("127.0.0.1", "127.1")) == {"Redis password": "warning"}  # it takes any
    server.config_set("requirepass", "sesame")
    config = load_config(DEMO, [f"redis.url={own_url.replace('127.0.0.1', '127.1')}"])
    found = list(redis_findings(config))
    assert {finding.verdict for finding in found} == {"ok"}
    assert not any("sesame" in finding.text for finding in found)


def test_user_with_few_rights(server: redis.Redis, own_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REDIS_PASSWORD_VARIABLE, "sesame")
    user = own_url.replace("redis://", "redis://few@")
    server.acl_setuser("few", enabled=True, passwords=["+sesame"], commands=["+ping", "+time"])
    assert verdicts(user) == {"Redis": "warning"}
    server.acl_setuser("few", enabled=True, commands=["+info"])
    assert verdicts(user) == {"Redis file": "warning"}  # its settings can't be read
    server.acl_deluser("few")


def test_absent_server_and_missing_certificate(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert verdicts(f"redis://{address}") == {"Redis": "error"}
    assert verdicts(f"rediss://{address}", f"redis.ca_file={tmp_path / 'none.pem'}") == {"Redis": "error"}


def test_embedded_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = redis_findings(demo_config(tmp_path))
    assert (found.verdict, "Valkey" in found.value) == ("ok", True)
    monkeypatch.setattr("slipstream.tools.doctor.redis.get_binary_path", lambda: tmp_path / "gone")
    (found,) = redis_findings(demo_config(tmp_path))
    assert found.verdict == "error"


@pytest.mark.parametrize(
    ("info", "verdict"),
    [
        ({"redis_version": "7.0.15"}, "ok"),
        ({"redis_version": "6.2.14"}, "error"),
        ({"redis_version": "10.1"}, "ok"),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.0"}, "ok"),
        ({}, "error"),
    ],
)
def test_version_of_a_server(info: dict[str, str], verdict: str) -> None:
    assert version(info).verdict == verdict


def test_other_reports_of_a_server(tmp_path: Path) -> None:
    config: RunConfig = demo_config(tmp_path)
    assert memory({"total_system_memory": 1000}, config).verdict == "warning"
    assert memory({}, config).verdict == eviction({}).verdict == "ok"
    (failed,) = persistence({"aof_enabled": 1, "aof_last_write_status": "err"}, {})
    assert failed.verdict == "error"
