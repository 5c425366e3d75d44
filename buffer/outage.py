"""Redis away or refusing writes: what is worth waiting for, for how long, and what is said meanwhile."""

import time
from collections.abc import Awaitable
from typing import TypeVar

import redis.exceptions

from slipstream.configs.errors import DeadlineError
from slipstream.configs.logs import NowAndThen, get_log
from slipstream.configs.schema.buffer import RedisConfig

log = get_log("buffer.outage")

T = TypeVar("T")

SAY_EVERY_S = 5.0
TROUBLE = (redis.exceptions.RedisError, redis.exceptions.RedisClusterException)
"""Whatever is the matter with Redis: redis-py's errors about a cluster as a whole are none of its RedisError."""
PASSING = (
    redis.exceptions.ConnectionError,  # also while it loads its data
    redis.exceptions.TimeoutError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.ClusterError,
    redis.exceptions.TryAgainError,
    redis.exceptions.SlotNotCoveredError,
)
PASSING_WORDS = ("BUSY ", "MISCONF ", "NOREPLICAS ", "All slots are not covered", "startup_nodes could not agree")
"""Beginnings of what redis-py has no class for."""


def passes(error: BaseException | None) -> bool:
    """Whether the same command may succeed later: Redis is away, loading, full, busy with a script, can't write its
    file, or its cluster has to sort itself out.
    """
    if isinstance(error, redis.exceptions.AuthenticationError):
        return False
    if isinstance(error, PASSING) or str(error).startswith(PASSING_WORDS):
        return True
    # Of a cluster that nobody can reach the reason says more.
    return isinstance(error, redis.exceptions.RedisClusterException) and passes(error.__cause__ or error.__context__)


class Outage:
    """The present outage, if there is one."""

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._since: float | None = None
        self._news = NowAndThen(SAY_EVERY_S)

    def note(self, error: Exception) -> None:
        """A command failed.

        Raises: the error itself if waiting is no use, DeadlineError when it has lasted for `redis.outage_deadline_s`.
        """
        if not passes(error):
            raise error
        now, address, deadline_s = time.monotonic(), self._config.address, self._config.outage_deadline_s
        self._since = now if self._since is None else self._since
        lasting_s = now - self._since
        if lasting_s > deadline_s:
            raise DeadlineError(
                f"Redis at {address} can't be used, for {lasting_s:.0f} s now (redis.outage_deadline_s={deadline_s:g})"
                f": {error}; check that it runs there, that it has room, and that this host reaches it"
            ) from error
        if self._news.due():
            log.warning("waiting for Redis", address=address, for_s=round(lasting_s, 1), error=str(error))

    def over(self) -> None:
        """A command succeeded."""
        if self._since is not None:
            log.info("Redis is back", after_s=round(time.monotonic() - self._since, 1))
            self._since = None
            self._news = NowAndThen(SAY_EVERY_S)


class Fullness:
    """A Redis that has no memory left, which refuses what needs some."""

    def __init__(self) -> None:
        self._news = NowAndThen(SAY_EVERY_S)

    async def attempt(self, work: Awaitable[T]) -> T | None:
        """Work that is asked for again later if there is no memory for it; all else goes on, as it frees some.

        Returns: what came of it, None if there was no memory.
        """
        try:
            return await work
        except redis.exceptions.OutOfMemoryError as error:
            if self._news.due():
                log.warning("Redis is full: groups and tickets wait until the learner has made room", error=str(error))
            return None
