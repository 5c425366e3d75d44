"""Atomic and durable file writes, and the exit code of commands that print."""

import errno
import io
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

FILE_POLL_S = 1.0
PARTIAL = "."
"""Prefix of the names of incomplete files."""


def write_atomically(
    path: Path, pieces: Iterable[bytes | memoryview], *, durable: bool = True, mode: int = 0o666
) -> int:
    """Writes a file that others see complete or not at all; returns its size. Raises: OSError.

    Args:
        durable: fsync it, which may take long: of a file that is soon written anew a power loss may cost the content.
        mode: of the file, less the umask.
    """
    temporary = path.with_name(f"{PARTIAL}{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
            for piece in pieces:
                file.write(piece)
            size = file.tell()
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        fsync_path(path.parent)
    return size


def apply_default_mode(path: Path) -> None:
    """Gives a file the mode of a new one, by the process's umask; safetensors lets only its owner read it.

    Raises: OSError.
    """
    # By a new file: os.umask() returns its value only by changing it, for other threads too.
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.touch()
    try:
        path.chmod(stat.S_IMODE(new.stat().st_mode))
    finally:
        new.unlink()


def fsync_path(path: Path) -> None:
    """Makes a file's content, or a folder's entries, survive a power loss. Raises: OSError."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def file_checksum(path: Path) -> str:
    """xxh3 (64 bits) of a file, read in pieces. Raises: OSError."""
    import hashlib  # here, as xxhash: few processes need them

    import xxhash

    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


async def wait_for_file(path: Path) -> None:
    """Returns once the file exists."""
    import asyncio  # here: commands import this module before they know whether they need it

    while not path.exists():
        await asyncio.sleep(FILE_POLL_S)


DISK_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
INACCESSIBLE_ERRNOS: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP})
"""Mistakes in a path that a user named."""
BROKEN_PIPE_EXIT_CODE: Final = 128 + signal.SIGPIPE
"""Exit code when the reader of stdout has closed it, as `| head` does: that of a process ended by SIGPIPE."""


def run_with_stdout(work: Callable[[], int]) -> int:
    """Runs a command that prints, flushes stdout, and returns its exit code; errors of stdout cause no traceback.

    Characters that stdout's encoding lacks become question marks.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            return work()
        finally:
            if sys.stdout is not None:  # None: closed by the process that started this one
                sys.stdout.flush()
    except BrokenPipeError:
        code = BROKEN_PIPE_EXIT_CODE
    except SystemExit as exit_:
        if not isinstance(exit_.__context__, BrokenPipeError):  # on which rich exits with 1
            raise
        code = BROKEN_PIPE_EXIT_CODE
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS | INACCESSIBLE_ERRNOS:
            raise
        what = "written to" if error.errno in DISK_FULL_ERRNOS else "used"
        sys.stderr.write(f"error: {error.filename or 'stdout'} can't be {what}: {error.strerror}\n")
        code = 1
    # The rest of the buffer would fail again at the process's end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
