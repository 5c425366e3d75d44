"""A run's folder as one process's alone: a second one of its kind would write into the same files."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from slipstream.configs.errors import ConfigError
from slipstream.configs.folder import RunFolder, unwritable
from slipstream.configs.schema import RunConfig

UP: Final = "`slipstream up`"
LEARNER: Final = "learner"


@contextmanager
def claimed(config: RunConfig, *, by: str) -> Iterator[None]:
    """Keeps others of the kind `by` off the run's folder while the block lasts; however the process ends, the kernel
    lets go.

    Raises: ConfigError when one is at it, or there can't be a lock.
    """
    path = _lock_path(RunFolder.of(config), by)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a+b", buffering=0)
    except OSError as error:
        raise unwritable(config, error) from None
    with lock:
        if not _locked(lock.fileno(), fcntl.LOCK_EX):
            raise _in_use(RunFolder.of(config), by)
        with suppress(OSError):  # a full disk has no room for the words, but for the lock
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield


def require_free(folder: RunFolder) -> None:
    """Leaves no trace. Raises: ConfigError when somebody of this host has claimed the folder."""
    for by in (UP, LEARNER):
        if _is_claimed(folder, by):
            raise _in_use(folder, by)


def is_claimed(folder: RunFolder) -> bool:
    """Whether somebody of this host is at the folder."""
    return any(_is_claimed(folder, by) for by in (UP, LEARNER))


def _is_claimed(folder: RunFolder, by: str) -> bool:
    try:
        with _lock_path(folder, by).open("rb") as lock:
            return not _locked(lock.fileno(), fcntl.LOCK_SH)
    except OSError:
        return False


def _lock_path(folder: RunFolder, by: str) -> Path:
    if by == UP:  # beside the folder, because --fresh renames that
        root = folder.root if folder.root.name else folder.root.absolute()  # `.` has no name
        return root.with_name(f".{root.name}.lock")
    # Of this host: on another one a learner may be cut off for good, and the network's file system still hold its lock.
    return folder.root / f".learner-{socket.gethostname()}.lock"


def _locked(file: int, kind: int) -> bool:
    # Other errors: some network file systems have no locks; that is no reason not to run there.
    with suppress(OSError):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _in_use(folder: RunFolder, by: str) -> ConfigError:
    holder = _lock_path(folder, by).read_text(encoding="utf-8")
    return ConfigError(f"{folder.root} is in use by another {by} ({holder}): stop that, or choose another run.name")
