"""A run's folder as one `slipstream up`'s alone: a second one would write into the same files."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from slipstream.configs.errors import ConfigError
from slipstream.configs.folder import RunFolder


@contextmanager
def claimed(folder: RunFolder) -> Iterator[None]:
    """Keeps others off for as long as the block lasts; however the process ends, the kernel lets go.

    The lock is beside the folder, because --fresh renames that.

    Raises: ConfigError when somebody is at it, or there can't be a lock.
    """
    path = folder.root.with_name(f".{folder.root.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a+b", buffering=0)
    except OSError as error:
        raise ConfigError(
            f"run.dir={folder.root.parent}: can't write {error.filename}: {error.strerror}; name a folder for runs "
            "that this process may write to"
        ) from None
    with lock:
        _lock(lock.fileno(), folder, path.read_text(encoding="utf-8"))
        with suppress(OSError):  # a full disk has no room for the words, but for the lock
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield


def _lock(file: int, folder: RunFolder, holder: str) -> None:
    # Other errors: some network file systems have no locks; that is no reason not to run there.
    with suppress(OSError):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder.root} is in use by another `slipstream up` ({holder}): stop that, or choose another run.name"
            ) from None
