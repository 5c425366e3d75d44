"""Redis away or refusing writes: what is worth waiting for, for how long, and what is said meanwhile."""

import ssl
import time
from collections.abc import Awaitable
from typing import TypeVar

import redis.exceptions

from slipstream.configs.errors import DeadlineError
from slipstream.configs.logs import NowAndThen, get_log
from slipstream.configs.schema.buffer import RedisConfig

log = get_log("buffer.outage")

T = TypeVar("T")

SAY_AFTER_S = 1.0
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
    if isinstance(error, redis.exceptions.AuthenticationError) or is_untrusted(error):
        return False
    if isinstance(error, PASSING) or str(error).startswith(PASSING_WORDS):
        return True
    # Of a cluster that nobody can reach the reason says more.
    return isinstance(error, redis.exceptions.RedisClusterException) and passes(error.__cause__ or error.__context__)


def is_untrusted(error: BaseException | None) -> bool:
    """Whether nobody whom we trust vouches for the server's certificate: redis-py calls that a connection error."""
    return isinstance(error, redis.exceptions.ConnectionError) and isinstance(
        error.__context__, ssl.SSLCertVerificationError
    )


class Outage:
    """The present outage, if there is one."""

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._since: float | None = None
        self._news = NowAndThen(SAY_EVERY_S)
        self._told = False

    def notice(self, error: Exception) -> None:
        """A command has failed and is tried again; when that has gone on for SAY_AFTER_S, it is said."""
        if self._lasting_s(error) > SAY_AFTER_S:
            self._tell(error)

    def note(self, error: Exception) -> None:
        """A command has failed for good.

        Raises: the error itself if waiting is no use, DeadlineError when it has lasted for `redis.outage_deadline_s`.
        """
        if not passes(error):
            raise error
        lasting_s, deadline_s = self._lasting_s(error), self._config.outage_deadline_s
        if lasting_s > deadline_s:
            raise DeadlineError(
                f"Redis at {self._config.address} can't be used, for {lasting_s:.0f} s now "
                f"(redis.outage_deadline_s={deadline_s:g}): {error}; check that it runs there, that it has room, and "
                "that this host reaches it"
            ) from error
        self._tell(error)

    def over(self) -> None:
        """A command succeeded."""
        if self._since is None:
            return
        if self._told:
            log.info("Redis is back", after_s=round(time.monotonic() - self._since, 1))
        self._since = None
        self._news = NowAndThen(SAY_EVERY_S)
        self._told = False

    def _lasting_s(self, error: Exception) -> float:
        now = time.monotonic()
        if self._since is None:
            # What Redis did not answer has waited for so long already.
            silent = isinstance(error, redis.exceptions.TimeoutError)
            self._since = now - self._config.deadline_s if silent else now
        return now - self._since

    def _tell(self, error: Exception) -> None:
        if self._news.due():
            self._told = True
            log.warning(
                "waiting for Redis",
                address=self._config.address,
                for_s=round(self._lasting_s(error), 1),
                error=str(error),
            )


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
                log.warning(
                    "Redis is full: groups and tickets wait until the learner has made room",
                    error=str(error),
                    remedy="raise maxmemory, or lower learner.checkpoint.every_steps or buffer.retention.max_groups",
                )
            return None
