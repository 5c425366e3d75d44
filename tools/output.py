"""What is printed, to a reader that may go before all is said, or to a disk that is full."""

import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NOT_FOR_US: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP})
"""What is wrong with a path that a user named, wherever it is first looked at."""
UNREAD: Final = 128 + signal.SIGPIPE
"""The exit code of what nobody reads any more, as after `| head`: that of a process which SIGPIPE ended."""


def printed(work: Callable[[], int]) -> int:
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
        code = UNREAD
    except SystemExit as told:
        if not isinstance(told.__context__, BrokenPipeError):  # which rich takes for a reason to exit with 1
            raise
        code = UNREAD
    except OSError as error:
        if error.errno not in NO_ROOM | NOT_FOR_US:
            raise
        what = "written to" if error.errno in NO_ROOM else "used"
        print(f"error: {error.filename or 'stdout'} can't be {what}: {error.strerror}", file=sys.stderr)
        code = 1
    # What is left in the buffer would fail once more at the process's end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


class _LastingFile(io.FileIO):
    """A file descriptor that becomes the null device once nothing can be written to it."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Writes it, or says on stderr why that can't be done any more."""
        size = memoryview(data).nbytes
        try:
            written = super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            with suppress(OSError):  # it may have gone the same way
                print(f"the progress can no longer be shown ({error.strerror}); the run goes on", file=sys.stderr)
            return size
        # None: a terminal that somebody has stopped takes nothing for now; what it misses, the next table shows.
        return size if written is None else written


def lasting_stdout() -> io.TextIOWrapper:
    """What prints to stdout as long as that can be done: a run of days must not end because of `| head`."""
    writer = io.BufferedWriter(_LastingFile(sys.stdout.fileno(), "w", closefd=False))
    return io.TextIOWrapper(writer, sys.stdout.encoding, sys.stdout.errors, line_buffering=True)
