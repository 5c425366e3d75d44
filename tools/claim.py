"""A run's folder as one `slipstream up`'s alone: a second one would write into the same files."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slipstream.configs.errors import ConfigError
from slipstream.configs.folder import RunFolder


@contextmanager
def claimed(folder: RunFolder) -> Iterator[None]:
    """Keeps others off for as long as the block lasts; however the process ends, the kernel lets go.

    The lock is beside the folder, because --fresh renames that.

    Raises: ConfigError when somebody is at it, or there can't be a lock.
    """
    path = _lock_path(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a+b", buffering=0)
    except OSError as error:
        raise ConfigError(
            f"run.dir={folder.root.parent}: can't write {error.filename}: {error.strerror}; name a folder for runs "
            "that this process may write to"
        ) from None
    with lock:
        if not _locked(lock.fileno(), fcntl.LOCK_EX):
            raise _in_use(folder)
        with suppress(OSError):  # a full disk has no room for the words, but for the lock
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield


def require_free(folder: RunFolder) -> None:
    """Leaves no trace. Raises: ConfigError when somebody has claimed the folder."""
    if is_claimed(folder):
        raise _in_use(folder)


def is_claimed(folder: RunFolder) -> bool:
    """Whether a `slipstream up` of this host is at the folder."""
    try:
        with _lock_path(folder).open("rb") as lock:
            return not _locked(lock.fileno(), fcntl.LOCK_SH)
    except OSError:
        return False


def _lock_path(folder: RunFolder) -> Path:
    return folder.root.with_name(f".{folder.root.name}.lock")


def _locked(file: int, kind: int) -> bool:
    # Other errors: some network file systems have no locks; that is no reason not to run there.
    with suppress(OSError):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _in_use(folder: RunFolder) -> ConfigError:
    holder = _lock_path(folder).read_text(encoding="utf-8")
    return ConfigError(
        f"{folder.root} is in use by another `slipstream up` ({holder}): stop that, or choose another run.name"
    )
