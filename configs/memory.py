"""How a process holds its memory: the C library's allocator, and Python's garbage collector while it imports."""

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> None:
    """Keeps freed blocks up to 1 GiB in the process: glibc returns each to the kernel, whose page faults cost more than
    the arithmetic of a small model. No effect on other C libraries."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around the import of large libraries: Python's garbage collector would walk through what they define again and
    again, for a fifth of the time that a start takes. So it pauses, and leaves alone what is there by then."""
    known = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if len(sys.modules) > known:  # otherwise what is there are the objects of a process at work
            gc.freeze()
