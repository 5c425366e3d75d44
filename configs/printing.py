"""What is printed, to a reader that may go before all is said, or to a disk that is full."""

import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

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
        sys.stderr.write(f"error: {error.filename or 'stdout'} can't be {what}: {error.strerror}\n")
        code = 1
    # What is left in the buffer would fail once more at the process's end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
