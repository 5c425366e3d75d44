"""Stop signals: during slow imports, in event loops, and in processes that stop gracefully. Quickly imported itself."""

import gc
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
STOP_EXIT_CODES: Final = tuple(128 + number for number in STOP_SIGNALS)
"""Exit codes of a process that was stopped by one of them, as shells have them."""


def service_exit_code(number: int) -> int:
    """Exit code of a service that a signal has stopped: 0 for SIGTERM, which ends it in order and has no other end to
    wait for; 128 + the number for Ctrl-C, which ends a shell's loop too."""
    return 0 if number == signal.SIGTERM else 128 + number


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Context for the import of large libraries: pauses the garbage collector, and exits on stop signals.

    The collector would scan their objects again and again, a fifth of a start's time. Afterwards they are frozen.

    Raises: SystemExit as `exit_on_signals` does.
    """
    known = len(sys.modules)
    gc.disable()
    try:
        with exit_on_signals():
            yield
    finally:
        gc.enable()
        if len(sys.modules) > known:  # otherwise the objects are those of a process at work
            gc.freeze()


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Context in which SIGINT and SIGTERM exit the process, though an event loop has handlers for them: the loop does
    not run meanwhile. Without effect outside of the main thread.

    Raises: SystemExit with 128 + the signal's number.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt  # not SystemExit: a plug-in that calls sys.exit() raises that

    previous = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    except KeyboardInterrupt:
        received.append(signal.SIGINT)  # the first counts
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if received:  # also where a library swallowed the exception, or raised its own instead
            sys.exit(128 + received[0])


def restore_default_sigint() -> None:
    """Lets Ctrl-C end this process at once and without a traceback, until another handler is installed.

    For the time before imports that take most of a second: there is nothing to clean up yet. An exception would not do,
    because libraries in Rust and C turn it into a panic, or swallow it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def add_stop_handler(stop: Callable[[int], object]) -> None:
    """Calls `stop` with the number of each SIGINT and SIGTERM from now on, in the running event loop."""
    import asyncio  # here: `restore_default_sigint` is called before slow imports, and must not wait for one

    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop, number)


class StopRequested(Exception):
    """Rank 0 or another received a stop signal, and all ranks agree on where they stop."""

    def __init__(self, number: int) -> None:
        """`number` is the signal's."""
        super().__init__(f"stopped by signal {number}")
        self.number = number


_STDERR: Final = 2
_DEFERRED_MESSAGE: Final = b"stopping after this step, once what is trained is saved (a second signal: at once)\n"


class GracefulStop:
    """Exits the process on SIGINT or SIGTERM; while deferred, the first one is only recorded, and the second exits.

    Attributes:
        number: number of the recorded signal; 0: none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._is_deferred = False

    def install(self) -> None:
        """Installs the handlers, in the main thread. They raise SystemExit, which runs the clean-up."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._handle)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Context in which the first signal is only recorded."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def is_requested(self) -> bool:
        """True if a signal was recorded."""
        return self.number != 0

    def _handle(self, number: int, _: FrameType | None) -> None:
        if not self._is_deferred or self.number:
            sys.exit(128 + number)
        self.number = number
        with suppress(OSError):  # not the log: the signal may have interrupted it in the middle of a line
            os.write(_STDERR, _DEFERRED_MESSAGE)


class StopSignals:
    """Context in which SIGINT, SIGTERM and SIGHUP are recorded and raise nothing, so that they interrupt no clean-up.

    To be entered in the main thread.

    Attributes:
        received: the signals so far.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._reader, self._writer = socket.socketpair()
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_wakeup = -1

    def __enter__(self) -> "StopSignals":
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGHUP, signal.SIGCHLD):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # under nohup the process outlives its terminal
            self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        self._reader.close()
        self._writer.close()

    @property
    def stop_count(self) -> int:
        """Number of SIGINT and SIGTERM; SIGHUP does not count, because a terminal that closes may send it twice."""
        return sum(number != signal.SIGHUP for number in self.received)

    def wait(self, timeout_s: float) -> None:
        """Returns after `timeout_s`, or earlier when a signal was received or a child ended."""
        if select.select([self._reader], [], [], timeout_s)[0]:
            self._reader.recv(4096)

    def _record(self, number: int, _: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self.received.append(signal.Signals(number))
