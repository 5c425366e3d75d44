"""What takes seconds at a start, such as importing vLLM, and signals that come meanwhile. Quickly imported itself."""

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any


@contextlib.contextmanager
def heavy_imports() -> Iterator[None]:
    """Around the import of large libraries.

    Python's garbage collector would walk through what they define again and again, for a fifth of the time that a start
    takes. So it pauses, and leaves alone what is there by then.

    Exits: as `exit_on_signals` does.
    """
    known = len(sys.modules)
    gc.disable()
    try:
        with exit_on_signals():
            yield
    finally:
        gc.enable()
        if len(sys.modules) > known:  # otherwise what is there are the objects of a process at work
            gc.freeze()


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Around what an event loop waits for: it hears of no signal, so in the main thread they end the process here.

    Exits: 128 + the signal's number, at SIGINT or SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        told.append(number)
        raise KeyboardInterrupt  # not SystemExit: that is what a plug-in raises which calls sys.exit()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(128 + (told[-1] if told else signal.SIGINT))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def restore_default_sigint() -> None:
    """From now on Ctrl-C ends this process at once and without a traceback, until something else is made of it.

    To be called before what takes most of a second to import: there is nothing to clean up yet. An exception would not
    do, because libraries in Rust and C make a panic of it, or nothing at all.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)


_STDERR = 2
_DEFERRED_MESSAGE = b"told to end: after this step, once what is trained is saved (told once more: at once)\n"


class StopRequested(Exception):
    """A rank was told to end, and all have come to know of it at the same place."""

    def __init__(self, number: int) -> None:
        """`number` is the signal's."""
        super().__init__(f"told by signal {number}")
        self.number = number


class GracefulStop:
    """What has become of them.

    Attributes:
        number: number of the signal that was noted; 0: none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._deferring = False

    def install(self) -> None:
        """From now on they end the process by a plain exit, which runs the clean-up; for the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._handle)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Meanwhile the first one is only noted."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def is_requested(self) -> bool:
        """Whether one has been."""
        return self.number != 0

    def _handle(self, number: int, _: FrameType | None) -> None:
        if not self._deferring or self.number:
            sys.exit(128 + number)
        self.number = number
        with suppress(OSError):  # not by the log: it may have been interrupted in the middle of a line
            os.write(_STDERR, _DEFERRED_MESSAGE)


ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """While it is entered, Ctrl-C, SIGTERM and SIGHUP are noted instead of raising anywhere.

    So no clean-up is ever cut in two. To be entered in the main thread.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._reader, self._writer = socket.socketpair()
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> "StopSignals":
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*ASKING, signal.SIGCHLD):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: it is to outlive its terminal
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()

    @property
    def stop_count(self) -> int:
        """How often a person asked; a terminal that closes may send its SIGHUP twice."""
        return sum(number != signal.SIGHUP for number in self.received)

    def wait(self, timeout_s: float) -> None:
        """Returns after `timeout_s`, or earlier when a signal came or a child ended."""
        if select.select([self._reader], [], [], timeout_s)[0]:
            self._reader.recv(4096)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in ASKING:
            self.received.append(signal.Signals(number))
