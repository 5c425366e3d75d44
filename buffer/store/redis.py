"""Redis: connections (password from the environment, TLS from the configuration, retries during outages), the ledger's
keys and its Lua scripts.
"""

import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import redis
import redis.asyncio
import redis.backoff
import redis.exceptions
import redis.retry
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.exceptions import AuthenticationError, BusyLoadingError, ConnectionError

from slipstream.configs.runtime.errors import ConfigError, DeadlineError, SlipstreamError, StoppedError
from slipstream.configs.runtime.logging import LogInterval, get_log
from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE, redis_password
from slipstream.configs.schema.buffer import RedisConfig

log = get_log("buffer.outage")

T = TypeVar("T")

LOG_AFTER_S = 1.0
LOG_EVERY_S = 5.0
TRANSIENT = (
    redis.exceptions.ConnectionError,  # also while it loads its data
    redis.exceptions.TimeoutError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
)
TRANSIENT_PREFIXES = ("BUSY ", "MISCONF ", "NOREPLICAS ")
"""Prefixes of errors without a class in redis-py."""


def is_transient(error: BaseException | None) -> bool:
    """True if the same command may succeed later: Redis is away, loading, full, busy, or can't write its file."""
    if isinstance(error, redis.exceptions.AuthenticationError) or is_untrusted_certificate(error):
        return False
    return isinstance(error, TRANSIENT) or str(error).startswith(TRANSIENT_PREFIXES)


def is_untrusted_certificate(error: BaseException | None) -> bool:
    """True if the server's certificate could not be verified, which redis-py reports as a connection error."""
    return isinstance(error, redis.exceptions.ConnectionError) and isinstance(
        error.__context__, ssl.SSLCertVerificationError
    )


class Outage:
    """Tracks the present outage, logs it, and applies `redis.outage_deadline_s`."""

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._since: float | None = None
        self._log_interval = LogInterval(LOG_EVERY_S)
        self._logged = False

    def retried(self, error: Exception) -> None:
        """Records a failure before a retry; an outage of more than LOG_AFTER_S is logged."""
        if self._lasting_s(error) > LOG_AFTER_S:
            self._log(error)

    def failed(self, error: Exception) -> None:
        """Records a command's final failure.

        Raises: the error itself if it is not transient, DeadlineError after `redis.outage_deadline_s`.
        """
        if not is_transient(error):
            raise error
        lasting_s, deadline_s = self._lasting_s(error), self._config.outage_deadline_s
        if lasting_s > deadline_s:
            raise DeadlineError(
                f"Redis at {self._config.address} can't be used, for {lasting_s:.0f} s "
                f"(redis.outage_deadline_s={deadline_s:g}): {error}; check that it runs there, that it has room, and "
                "that this host reaches it"
            ) from error
        self._log(error)

    def recovered(self) -> None:
        """Records a success, which ends the outage."""
        if self._since is None:
            return
        if self._logged:
            log.info("Redis is back", after_s=round(time.monotonic() - self._since, 1))
        self._since = None
        self._log_interval = LogInterval(LOG_EVERY_S)
        self._logged = False

    def _lasting_s(self, error: Exception) -> float:
        now = time.monotonic()
        if self._since is None:
            # A timeout means that the outage began deadline_s ago.
            silent = isinstance(error, redis.exceptions.TimeoutError)
            self._since = now - self._config.deadline_s if silent else now
        return now - self._since

    def _log(self, error: Exception) -> None:
        if self._log_interval.due():
            self._logged = True
            log.warning(
                "waiting for Redis",
                address=self._config.address,
                for_s=round(self._lasting_s(error), 1),
                error=str(error),
            )


class MemoryGuard:
    """Postpones work that a full Redis refuses."""

    def __init__(self) -> None:
        self._log_interval = LogInterval(LOG_EVERY_S)

    async def attempt(self, work: Awaitable[T]) -> T | None:
        """Awaits work that is repeated later if Redis has no memory for it.

        Returns: the result, None if there was no memory.
        """
        try:
            return await work
        except redis.exceptions.OutOfMemoryError as error:
            if self._log_interval.due():
                log.warning(
                    "Redis is full: groups and tickets wait until the learner has made room",
                    error=str(error),
                    remedy="raise maxmemory, or lower learner.checkpoint.every_steps or buffer.retention.max_groups",
                )
            return None


RETRY_S = 0.1

Answer = TypeVar("Answer")


def connect(config: RedisConfig, *, deadline_s: float | None = None) -> redis.Redis:
    """A blocking client that tries every command once, for at most `deadline_s` (default: `redis.deadline_s`).

    Raises: ConfigError when a TLS file can't be read.
    """
    once = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
    return redis.Redis.from_url(config.address, retry=once, **_settings(config, deadline_s or config.deadline_s))


def connect_async(config: RedisConfig, outage: Outage | None = None) -> redis.asyncio.Redis:
    """An asyncio client that retries for `redis.deadline_s` while Redis can't be reached.

    Every command raises SlipstreamError when Redis rejects the password or its certificate can't be verified.

    Args:
        outage: records every retry.

    Raises: ConfigError when a TLS file can't be read.
    """
    settings = _settings(config, config.deadline_s) | {"retry": _RetryUnlessRejected(config, outage)}
    return redis.asyncio.Redis.from_url(config.address, **settings)


def retry_through_outage(
    config: RedisConfig, do: Callable[[], Answer], *, given_up: threading.Event | None = None
) -> Answer:
    """Calls `do` again while Redis fails transiently, for at most `redis.outage_deadline_s`; returns its result.

    Raises: DeadlineError after that time, StoppedError once `given_up` is set, SlipstreamError for other errors, such
    as a wrong password.
    """
    given_up = given_up or threading.Event()
    outage = Outage(config)
    while True:
        try:
            return do()
        except redis.RedisError as error:
            if not is_transient(error):
                raise redis_error(config, error) from error
            outage.failed(error)
        if given_up.wait(RETRY_S):
            raise StoppedError(f"the wait for Redis at {config.address} was given up")


async def set_all(client: redis.asyncio.Redis, values: Mapping[str, bytes | memoryview]) -> None:
    """SETs all values in one pipeline.

    Not by MSET: it blocks Redis, and its entry for the append-only file is copied again for each further megabyte,
    20 ms for eight of them.
    """
    pipeline = client.pipeline(transaction=False)
    for name, value in values.items():
        pipeline.set(name, value)
    for answer in await pipeline.execute(raise_on_error=False):  # raised there, an error would quote the value
        if isinstance(answer, redis.RedisError):
            raise answer


def portions(items: Iterable[T], size_of: Callable[[T], int], *, most: int, most_bytes: int) -> Iterator[list[T]]:
    """Splits items, in order, into portions of limited number and size; a single item may be larger."""
    portion: list[T] = []
    size_bytes = 0
    for item in items:
        if portion and (len(portion) == most or size_bytes + size_of(item) > most_bytes):
            yield portion
            portion, size_bytes = [], 0
        portion.append(item)
        size_bytes += size_of(item)
    if portion:
        yield portion


def redis_error(config: RedisConfig, error: Exception) -> SlipstreamError:
    """An error with the address, the cause, and the remedy for a wrong password, certificate or version."""
    remedy = ""
    if "unexpected symbol near '#'" in str(error):  # the first character of every script, before 7.0 that of a comment
        remedy = "; it must be Redis 7.0 or later, or Valkey"
    if isinstance(error, AuthenticationError):
        wanted = "check the password" if redis_password() else "it requires a password"
        remedy = f"; {wanted} in the environment variable {REDIS_PASSWORD_VARIABLE}"
    if is_untrusted_certificate(error):
        remedy = "; name its authority's certificate in redis.ca_file, and the certificate's host name in redis.url"
    return SlipstreamError(f"Redis at {config.address} can't be used: {error}{remedy}")


class _RetryUnlessRejected(Retry):
    """Retries connection errors, except a wrong password or certificate, which redis-py also reports as such.

    Raises: SlipstreamError for these two, so that they don't count as an outage.
    """

    def __init__(self, config: RedisConfig, outage: Outage | None) -> None:
        # No retry after a timeout: the command has used its time already.
        super().__init__(
            redis.backoff.ConstantBackoff(RETRY_S),
            retries=round(config.deadline_s / RETRY_S),
            supported_errors=(ConnectionError, BusyLoadingError),
        )
        self._config = config
        self._outage = outage

    def __deepcopy__(self, memo: object) -> Self:
        """Returns itself: all connections share one outage."""
        return self

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[Answer]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> Answer:
        def retryable(error: Exception) -> bool:
            if not is_transient(error) or not (is_retryable is None or is_retryable(error)):
                return False
            if self._outage is not None:
                self._outage.retried(error)
            return True

        try:
            return await super().call_with_retry(do, fail, retryable, with_failure_count)
        except ConnectionError as error:
            if is_transient(error):
                raise
            raise redis_error(self._config, error) from error


def _settings(config: RedisConfig, deadline_s: float) -> dict[str, Any]:
    settings: dict[str, Any] = {"socket_timeout": deadline_s, "socket_connect_timeout": deadline_s}
    password = redis_password()
    if password:
        settings["password"] = password
    if config.address.startswith("rediss://"):
        settings["ssl_cert_reqs"] = "required"
        settings["ssl_check_hostname"] = True
        for key, option in (("ca_file", "ssl_ca_certs"), ("cert_file", "ssl_certfile"), ("key_file", "ssl_keyfile")):
            file = getattr(config, key)
            if file is not None:
                settings[option] = _readable(f"redis.{key}", file)
        _require_pem(config)
    return settings


def _readable(key: str, file: Path) -> str:
    try:
        with file.open("rb"):
            return str(file)
    except OSError as error:
        raise ConfigError(
            f"{key}={file} can't be read: {error.strerror}; name a PEM file that this process may read"
        ) from None


def _require_pem(config: RedisConfig) -> None:
    """Checks the files, because redis-py would report a connection error. Raises: ConfigError when one is not valid."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    what = f"redis.ca_file={config.ca_file} holds no certificates"
    try:
        if config.ca_file is not None:
            context.load_verify_locations(config.ca_file)
        what = f"redis.cert_file={config.cert_file} and redis.key_file={config.key_file} don't belong together"
        if config.cert_file is not None:
            # password="": an encrypted key is an error instead of a prompt at the terminal.
            context.load_cert_chain(config.cert_file, config.key_file, password="")
    except ssl.SSLError as error:
        raise ConfigError(f"{what}: {error}; name PEM files, the key without a password") from None


NEEDS_MEMORY = ("issue", "evaluate", "evaluated", "keep_events")
"""Scripts that a full Redis refuses; all others either free memory or must run even then."""
READ_ONLY = ("verify", "account", "steps", "snapshot", "room", "places")
"""Scripts without writes; Redis enforces it."""
LEARNER_ONLY = ("lease", "train", "publish", "throttle", "durable", "finish")
"""Scripts for the run's current learner only: the argument `learner` is its incarnation; empty skips the check."""


def run_prefix(run: str) -> str:
    """The prefix of every key of the run."""
    return f"{{slipstream:{run}}}"


def group_key(run: str, group_id: str) -> str:
    """The key under which a group's bytes are stored."""
    return f"{run_prefix(run)}:group:{group_id}"


class Scripts:
    """The scripts, on the keys of one run.

    Attributes:
        prefix: of these keys.
    """

    def __init__(self, redis: Redis, run: str) -> None:
        self.redis = redis
        self.prefix = run_prefix(run)
        self._scripts = {name: redis.register_script(text) for name, text in scripts().items()}

    async def call(self, name: str, *blobs: bytes | memoryview, **arguments: Any) -> Any:
        """Runs a script with named arguments, and bytes that JSON can't hold."""
        return await self._scripts[name](keys=[self.prefix], args=[msgspec.json.encode(arguments), *blobs])


@cache
def scripts() -> dict[str, str]:
    """The text of every script, by its name."""
    lua = [file for file in (files(__package__) / "lua").iterdir() if file.name.endswith(".lua")]
    texts = {file.name.removesuffix(".lua"): file.read_text(encoding="utf-8") for file in lua}
    prelude = texts.pop("counts") + texts.pop("prelude")
    return {name: f"#!lua{_flags(name)}\n{prelude}{_body(name, text)}" for name, text in texts.items()}


def _body(name: str, text: str) -> str:
    """The script inside a function, so that the counters are written wherever it returns."""
    check = "local refusal = check_learner(args.learner)\nif refusal then return refusal end\n"
    return (
        f"local function script()\n{text}end\n{check if name in LEARNER_ONLY else ''}"
        "local answer = script()\nwrite_counts()\nreturn answer\n"
    )


def _flags(name: str) -> str:
    if name in NEEDS_MEMORY:
        return ""
    return " flags=no-writes,allow-oom" if name in READ_ONLY else " flags=allow-oom"
