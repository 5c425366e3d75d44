"""Lets go, in threads, of what takes time to be destroyed."""

import threading
import time
from typing import Any
from weakref import WeakSet


class Endings:
    """The threads in which things end; they must be waited for before the process does."""

    def __init__(self) -> None:
        self._threads: WeakSet[threading.Thread] = WeakSet()

    def begin(self, held: list[Any]) -> None:
        """Empties a list that is the last to hold something."""
        thread = threading.Thread(target=held.clear, name="ending", daemon=True)
        self._threads.add(thread)
        thread.start()

    def wait(self, deadline_s: float) -> None:
        """Returns when all is gone; the deadline is for what never goes, and does no harm then.

        Python ends a thread that returns to it at the process's end. In the middle of a destructor of C++ that aborts
        the process.
        """
        until = time.monotonic() + deadline_s
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))
