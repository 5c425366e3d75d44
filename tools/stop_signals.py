"""Records the signals that ask for an end, and ends waits on them and on children's deaths at once."""

import select
import signal
import socket
from types import FrameType
from typing import Any

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
    def insisted(self) -> int:
        """How often a person asked; a terminal that closes may send its SIGHUP twice."""
        return sum(number != signal.SIGHUP for number in self.received)

    def wait(self, timeout_s: float) -> None:
        """Returns after `timeout_s`, or earlier when a signal came or a child ended."""
        if select.select([self._reader], [], [], timeout_s)[0]:
            self._reader.recv(4096)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in ASKING:
            self.received.append(signal.Signals(number))
