"""Kinds of arguments that several commands take."""

import argparse
import io
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console


def at_least(least: int) -> Callable[[str], int]:
    """A whole number that is not less."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return number


def seconds(text: str) -> float:
    """A finite number of more than 0."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be more than 0, and finite")
    return float(text)


def new_file(text: str) -> Path:
    """The path of a file in a folder that is there, so that what takes hours to find has a place."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}; make it, or name a file elsewhere")
    return path


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


def table_console(*, narrowest: int) -> Console:
    """A console of at least so many columns, because rich cuts off what of a table has no room.

    A terminal that has fewer breaks the lines instead.
    """
    console = Console()
    console.width = max(console.width, narrowest)
    return console
