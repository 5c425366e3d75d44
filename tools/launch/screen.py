"""Puts the progress of a run before the user's eyes: live in a terminal, as lines elsewhere."""

from dataclasses import replace
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live

from slipstream.tools.launch.progress import Progress, line, table

EVERY_S = 5.0
EVERY_STEPS = 20
STILL_S = 60.0
"""After so long the same is said once more: the run is still there."""


class Screen(Protocol):
    """Where progress is shown; a context manager."""

    def show(self, progress: Progress) -> None:
        """Takes the latest state; may be called as often as one likes."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class LiveScreen:
    """A table that is drawn over and over."""

    def __init__(self, console: Console) -> None:
        # No refresh thread: the supervisor must stay single-threaded while it starts children.
        self._live = Live(console=console, auto_refresh=False)

    def show(self, progress: Progress) -> None:
        """Draws the table."""
        self._live.update(table(progress), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


class PlainScreen:
    """A line for what is new, whenever enough time or enough steps have passed or another stage begins."""

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
        if shown is None or shown.stage != progress.stage or progress.steps_done - shown.steps_done >= EVERY_STEPS:
            return True
        waited_s = progress.elapsed_s - shown.elapsed_s
        is_news = line(replace(progress, elapsed_s=shown.elapsed_s)) != line(shown)
        return waited_s >= (EVERY_S if is_news else STILL_S)

    def _print(self, progress: Progress) -> None:
        self._shown = progress
        print(line(progress), flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._latest and self._shown and self._latest.steps_done > self._shown.steps_done:
            self._print(self._latest)


def make_screen(*, plain: bool) -> Screen:
    """A live table if stdout is a terminal that can draw one, and `plain` isn't asked for."""
    console = Console()
    # With FORCE_COLOR, as CI sets it, rich takes a file for a terminal; on a dumb one it shows nothing until the end.
    can_draw = console.is_terminal and console.file.isatty() and not console.is_dumb_terminal
    return LiveScreen(console) if can_draw and not plain else PlainScreen()
