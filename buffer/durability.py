"""Whether Redis keeps what it is given: it must drop nothing to make room, and should have a file."""

from typing import Any

from redis.asyncio.cluster import RedisCluster
from redis.exceptions import BusyLoadingError, ResponseError

from slipstream.buffer.connect import AsyncRedis
from slipstream.buffer.outage import passes
from slipstream.configs.errors import ConfigError
from slipstream.configs.logs import get_log

log = get_log("buffer.durability")


async def require_durable(redis: AsyncRedis, address: str) -> None:
    """Warns of a server without a file; one that doesn't say how it is set up is taken as it is.

    Args:
        address: what the server is called.

    Raises: ConfigError when it may evict keys; redis.RedisError when it can't be reached or still loads its data.
    """
    try:
        servers = await _infos(redis)
    except ResponseError as error:
        if passes(error):
            raise
        log.info("not known whether Redis evicts keys or keeps a file: we may not ask", reason=str(error))
        return
    if any(server.get("loading") == 1 for server in servers):
        # Until it has read its file, it says that it keeps none.
        raise BusyLoadingError("it is loading its data")
    for server in servers:
        policy = server.get("maxmemory_policy", "")
        if policy.startswith("allkeys-"):
            raise ConfigError(
                f"Redis at {address} drops keys when its memory is full (maxmemory-policy {policy}), and with them the "
                "ledger; set its maxmemory-policy to noeviction"
            )
    if any(server.get("aof_enabled") == 0 for server in servers):
        log.warning("REDIS KEEPS NO FILE (appendonly no): when it ends, the ledger is gone", redis=address)


async def _infos(redis: AsyncRedis) -> list[dict[str, Any]]:
    """What the server says of itself; of a cluster what each node says that may be written to."""
    if isinstance(redis, RedisCluster):
        await redis.initialize()
        return [await redis.info(target_nodes=node) for node in redis.get_primaries()]
    return [await redis.info()]
