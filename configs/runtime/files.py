"""Files that are there whole or not at all, that others may read, and that a power loss leaves as they are."""

import errno
import io
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final


def write_atomically(path: Path, pieces: Iterable[bytes | memoryview]) -> int:
    """Writes a file that is there whole or not at all, whoever reads or dies; returns its size. Raises: OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)
    return size


def apply_default_mode(path: Path) -> None:
    """Lets those use a file who may use any other that this process writes; safetensors makes it the user's alone.

    Raises: OSError.
    """
    # A new file has the mode that is wanted: os.umask() tells its value only by changing it, for other threads too.
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.touch()
    try:
        path.chmod(stat.S_IMODE(new.stat().st_mode))
    finally:
        new.unlink()


def fsync_path(path: Path) -> None:
    """Returns once a power loss leaves a file's content, or a folder's names, as they are. Raises: OSError."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


DISK_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
INACCESSIBLE_ERRNOS: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP})
"""What is wrong with a path that a user named, wherever it is first looked at."""
BROKEN_PIPE_EXIT_CODE: Final = 128 + signal.SIGPIPE
"""The exit code of what nobody reads any more, as after `| head`: that of a process which SIGPIPE ended."""


def run_with_stdout(work: Callable[[], int]) -> int:
    """The exit code of work that prints, once stdout has taken all of it; what does not end in a traceback.

    Characters that its encoding lacks become question marks.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            return work()
        finally:
            if sys.stdout is not None:  # else whoever started this process has closed it
                sys.stdout.flush()
    except BrokenPipeError:
        code = BROKEN_PIPE_EXIT_CODE
    except SystemExit as told:
        if not isinstance(told.__context__, BrokenPipeError):  # which rich takes for a reason to exit with 1
            raise
        code = BROKEN_PIPE_EXIT_CODE
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS | INACCESSIBLE_ERRNOS:
            raise
        what = "written to" if error.errno in DISK_FULL_ERRNOS else "used"
        sys.stderr.write(f"error: {error.filename or 'stdout'} can't be {what}: {error.strerror}\n")
        code = 1
    # What is left in the buffer would fail once more at the process's end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
