"""Checks of the Redis server at the start: eviction, append-only file, memory for the longest answers."""

import contextlib
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from redis.exceptions import BusyLoadingError, ResponseError

from slipstream.buffer.store.redis import is_transient
from slipstream.buffer.store.types import SPILL_BYTES
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.buffer import BufferConfig
from slipstream.configs.schema.learner import LearnerConfig
from slipstream.configs.schema.rollout import RolloutConfig

log = get_log("buffer.redis")

BYTES_PER_TOKEN = 6.5
"""Of a compressed group of long answers, measured: docs/ledger.md, Memory."""
BYTES_PER_ANSWER = 250
BYTES_PER_GROUP = 2500
"""Its record and history."""


@dataclass(frozen=True)
class ServerMemory:
    """The server's report of its memory; 0: no limit, or unknown."""

    maxmemory_bytes: int = 0
    host_bytes: int = 0


async def require_durable(client: redis.asyncio.Redis, address: str) -> ServerMemory:
    """Checks that Redis keeps its keys; warns if it has no append-only file, or loads one that is torn in a script.

    Needs permission for INFO, and for the last check for CONFIG GET.

    Args:
        address: the server's address, for messages.

    Raises: ConfigError when it may evict keys; redis.RedisError when it can't be reached or still loads its data.
    """
    try:
        info: dict[str, Any] = await client.info()
    except ResponseError as error:
        if is_transient(error):
            raise
        log.info("Redis does not permit INFO: eviction, persistence, memory are not checked", reason=str(error))
        return ServerMemory()
    if info.get("loading") == 1:
        # While loading, it reports no append-only file.
        raise BusyLoadingError("it is loading its data")
    policy = info.get("maxmemory_policy", "")
    if policy.startswith("allkeys-"):
        raise ConfigError(
            f"Redis at {address} drops keys when its memory is full (maxmemory-policy {policy}), and with them the "
            "ledger; set its maxmemory-policy to noeviction"
        )
    if info.get("aof_enabled") == 0:
        log.warning("REDIS HAS NO APPEND-ONLY FILE (appendonly no): its restart loses the ledger", redis=address)
    elif await _loads_torn_files(client):
        log.warning(
            "REDIS CUTS A TORN APPEND-ONLY FILE INSIDE A SCRIPT (aof-load-truncated yes): power failures may damage "
            "the ledger",
            redis=address,
            remedy="set aof-load-truncated to no (docs/ledger.md)",
        )
    return ServerMemory(int(info.get("maxmemory", 0)), int(info.get("total_system_memory", 0)))


async def _loads_torn_files(client: redis.asyncio.Redis) -> bool:
    with contextlib.suppress(ResponseError):  # few have the permission
        setting: dict[Any, Any] = await client.config_get("aof-load-truncated")
        return "yes" in setting.values() or b"yes" in setting.values()  # by the version of redis-py
    return False


def group_bytes(rollout: RolloutConfig) -> int:
    """Size in Redis of a group whose episodes all have the most tokens."""
    answer_bytes = rollout.episode_tokens * BYTES_PER_TOKEN + BYTES_PER_ANSWER
    return round(rollout.group_size * answer_bytes) + BYTES_PER_GROUP


def needed_bytes(
    buffer: BufferConfig, learner: LearnerConfig, rollout: RolloutConfig, *, groups_per_version: int
) -> int:
    """Memory for the groups of the pipeline, those trained since the last checkpoint, and the remembered ones.

    Of the latter two Redis holds bytes up to SPILL_BYTES, and larger ones of a step until its spill file is written.
    """
    size = group_bytes(rollout)
    pipeline = (buffer.max_staleness + 1) * groups_per_version
    kept = learner.groups_per_step * learner.checkpoint.every_steps + buffer.retention.max_groups
    kept_size = min(size, SPILL_BYTES + BYTES_PER_GROUP)
    return pipeline * size + kept * kept_size + learner.groups_per_step * (size - kept_size)


def require_memory(
    memory: ServerMemory,
    *,
    buffer: BufferConfig,
    learner: LearnerConfig,
    rollout: RolloutConfig,
    groups_per_version: int,
) -> None:
    """Checks that the longest answers fit into Redis; without `maxmemory` it warns if the host has too little memory.

    Raises: ConfigError when they exceed `maxmemory`.
    """
    needed = needed_bytes(buffer, learner, rollout, groups_per_version=groups_per_version)
    limit_bytes = memory.maxmemory_bytes or memory.host_bytes
    if not limit_bytes or needed <= limit_bytes:
        return
    limit = "maxmemory" if memory.maxmemory_bytes else "the memory of Redis's host"
    key = "rollout.episode.tokens" if rollout.episode.tokens else "rollout.sampling.max_tokens"
    problem = (
        f"{limit} of {_gigabytes(limit_bytes)} is less than the {_gigabytes(needed)} that Redis needs when all answers "
        f"have {key}={rollout.episode_tokens} and groups rollout.group_size="
        f"{rollout.group_size} of them; raise it, or lower buffer.max_staleness={buffer.max_staleness}, "
        f"learner.checkpoint.every_steps={learner.checkpoint.every_steps} or "
        f"buffer.retention.max_groups={buffer.retention.max_groups}"
    )
    if memory.maxmemory_bytes:
        raise ConfigError(problem)
    log.warning("Redis may run out of memory", reason=problem)


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.3g} GB"
