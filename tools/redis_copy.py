"""Looks into the data that an embedded Redis-protocol server left behind, without touching it: a copy is served."""

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from slipstream.configs.errors import ConfigError, SlipstreamError
from slipstream.configs.schema.buffer import RedisConfig
from slipstream.tools.redis_server import copy_command, wait_until_ready
from slipstream.tools.supervise import die_with_parent

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
