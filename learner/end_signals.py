"""Ctrl-C and SIGTERM: a learner that trains ends after its step, once it has saved what it has trained."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STDERR = 2
SAID = b"told to end: after this step, once what is trained is saved (told once more: at once)\n"


class ToldToEnd(Exception):
    """A rank was told to end, and all have come to know of it at the same place."""

    def __init__(self, number: int) -> None:
        """`number` is the signal's."""
        super().__init__(f"told by signal {number}")
        self.number = number


class EndSignals:
    """What has become of them.

    Attributes:
        told: number of the signal that was noted; 0: none.
    """

    def __init__(self) -> None:
        self.told = 0
        self._noting = False

    def listen(self) -> None:
        """From now on they end the process by a plain exit, which runs the clean-up; for the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._hear)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Meanwhile the first one is only noted."""
        self._noting = True
        try:
            yield
        finally:
            self._noting = False

    def are_noted(self) -> bool:
        """Whether one has been."""
        return self.told != 0

    def _hear(self, number: int, _: FrameType | None) -> None:
        if not self._noting or self.told:
            sys.exit(128 + number)
        self.told = number
        with suppress(OSError):  # not by the log: it may have been interrupted in the middle of a line
            os.write(STDERR, SAID)
