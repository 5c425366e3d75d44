"""Screens that show the progress of a run: a table that is redrawn in place, or lines."""

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, Self

from rich.console import Console, RenderableType
from rich.live import Live

from slipstream.tools.launch.progress import Progress, line, table

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PLAIN_EVERY_S = 5.0
PLAIN_EVERY_STEPS = 20
PLAIN_REPEAT_S = 60.0
"""An unchanged line is repeated after this long, so that the log shows that the run continues."""


class Screen(Protocol):
    """Shows the progress; a context manager."""

    def show(self, progress: Progress) -> None:
        """Takes the latest state; may be called at any rate."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class LiveScreen:
    """A table that is redrawn in place."""

    def __init__(self, console: Console, view: Callable[[Progress], RenderableType] = table) -> None:
        # No refresh thread: the supervisor must stay single-threaded while it starts children.
        self._live = Live(console=console, auto_refresh=False)
        self._view = view

    def show(self, progress: Progress) -> None:
        """Draws the table."""
        self._live.update(self._view(progress), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


class PlainScreen:
    """A line whenever the stage changes, or enough time or steps have passed."""

    def __init__(self) -> None:
        self._shown: Progress | None = None
        self._latest: Progress | None = None

    def show(self, progress: Progress) -> None:
        """Prints a line if one is due."""
        self._latest = progress
        if self._due(progress):
            self._print(progress)

    def _due(self, progress: Progress) -> bool:
        shown = self._shown
        if (
            shown is None
            or shown.stage != progress.stage
            or progress.steps_done - shown.steps_done >= PLAIN_EVERY_STEPS
        ):
            return True
        since_shown_s = progress.elapsed_s - shown.elapsed_s
        changed = line(replace(progress, elapsed_s=shown.elapsed_s)) != line(shown)
        return since_shown_s >= (PLAIN_EVERY_S if changed else PLAIN_REPEAT_S)

    def _print(self, progress: Progress) -> None:
        before, self._shown = self._shown, progress
        print(line(progress, before), flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._latest and self._shown and self._latest.steps_done > self._shown.steps_done:
            self._print(self._latest)


def make_screen(*, plain: bool) -> Screen:
    """A live table if stdout is a terminal that can draw one and `plain` is False, else lines."""
    console = Console()
    return LiveScreen(console) if can_draw(console) and not plain else PlainScreen()


def can_draw(console: Console) -> bool:
    """True if it is a terminal that can draw a live table."""
    # With FORCE_COLOR, as CI sets it, rich takes a file for a terminal; on a dumb one it shows nothing until the end.
    return console.is_terminal and console.file.isatty() and not console.is_dumb_terminal


def unbreakable_stdout() -> io.TextIOWrapper:
    """A stdout whose writes never fail: a run of days must not end because its reader has (`| head`)."""
    writer = io.BufferedWriter(_UnbreakableFile(sys.stdout.fileno(), "w", closefd=False))
    return io.TextIOWrapper(writer, sys.stdout.encoding, sys.stdout.errors, line_buffering=True)


class _UnbreakableFile(io.FileIO):
    """A file descriptor that is redirected to the null device at the first failed write."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Writes, or reports on stderr why the output ends here."""
        size = memoryview(data).nbytes
        try:
            written = super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            with suppress(OSError):  # stderr may be closed too
                print(f"the progress can no longer be shown ({error.strerror}); the run goes on", file=sys.stderr)
            return size
        # None: a stopped terminal accepts nothing at present; the next table shows what it misses.
        return size if written is None else written
