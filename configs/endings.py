"""Lets go, in threads, of what takes time to be destroyed."""

import threading
import time
from collections.abc import Callable
from typing import Any

ENDING = "ending"
"""Name of each of the threads."""


class Endings:
    """The threads in which things end; they must be waited for before the process does."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def begin(self, held: list[Any]) -> None:
        """Empties a list that is the last to hold something."""
        self.run(held.clear)

    def run(self, end: Callable[[], None]) -> None:
        """Calls what ends something."""
        thread = threading.Thread(target=end, name=ENDING, daemon=True)
        thread.start()
        with self._lock:
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def wait(self, deadline_s: float) -> None:
        """Returns when all is gone; the deadline is for what never goes, and does no harm then.

        Python ends a thread that returns to it at the process's end. In the middle of a destructor of C++ that aborts
        the process.
        """
        until = time.monotonic() + deadline_s
        with self._lock:
            threads = self._threads
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
