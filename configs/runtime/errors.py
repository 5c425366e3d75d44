"""Errors that a user can cause and correct, and how errors are worded."""

import difflib
from collections.abc import Sequence
from traceback import walk_tb
from typing import ClassVar, Final

CERTAIN: Final = 2
"""Exit code of a process that fails at each start: by a mistake in its command line or configuration, or refused."""


class SlipstreamError(Exception):
    """Root of the project's errors; the message names the thing, its value and the remedy."""

    exit_code: ClassVar[int] = 1
    """Exit code of a process that it ends."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Messages, each for a line of its own."""
        return (str(self),)


class ConfigError(SlipstreamError):
    """One or more mistakes in a configuration, reported together."""

    exit_code: ClassVar[int] = CERTAIN

    def __init__(self, problems: str | Sequence[str]) -> None:
        self._problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self._problems))

    @property
    def problems(self) -> tuple[str, ...]:
        """One message per mistake."""
        return self._problems


class DeadlineError(SlipstreamError):
    """A wait on another process exceeded its deadline; the message names it, its state and the time waited."""


class StoppedError(SlipstreamError):
    """A wait was given up because this process stops."""


class RefusedError(SlipstreamError):
    """Another process refused a request; the message has its reason."""

    exit_code: ClassVar[int] = CERTAIN


def suggest(word: str, known: Sequence[str]) -> str:
    """` (did you mean 'x'?)` for a misspelt word, or an empty text when no known one is similar."""
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def format_error(error: BaseException) -> str:
    """`Type: message` of any exception, user-defined ones included."""
    try:
        message = str(error)
    except Exception as worse:  # noqa: BLE001  (an error of the user's own class may fail at this, too)
        message = f"(its message can't be read: {type(worse).__name__})"
    return f"{type(error).__name__}: {message}"


def format_error_with_location(error: BaseException, module: str) -> str:
    """As `format_error`, with the last line of `module` in the traceback, if any."""
    reached = [
        f" ({frame.f_code.co_filename}:{line})"
        for frame, line in walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") == module
    ]
    return f"{format_error(error)}{''.join(reached[-1:])}"
