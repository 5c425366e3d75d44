"""A stdout that lasts: its reader may go, or its disk be full, before all is shown."""

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


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
