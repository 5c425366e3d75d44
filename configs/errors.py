"""The errors that a user can cause and mend."""

from collections.abc import Sequence


class SlipstreamError(Exception):
    """Root of the project's own errors: the message names the thing, its value and the remedy."""


class ConfigError(SlipstreamError):
    """One or more mistakes in a configuration, reported together."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class DeadlineError(SlipstreamError):
    """A wait on another party ran out; the message names the party, its state and the time waited."""


class RefusedError(SlipstreamError):
    """The other side refused what we asked for, with its reason."""
