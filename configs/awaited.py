"""Says whom a process waits for, once that takes long."""

import time
from collections.abc import Callable

from slipstream.configs.logs import Log, NowAndThen

SAY_AFTER_S = 10.0
SAY_EVERY_S = 60.0


class Awaited:
    """Another process, which may be away for a while."""

    def __init__(self, log: Log, whom: str, *, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`whom` stands for it in the log, as in `waiting for the buffer`."""
        self._log = log
        self._whom = whom
        self._address = address
        self._clock = clock
        self._since: float | None = None
        self._news = NowAndThen(SAY_EVERY_S, clock=clock)
        self._said = False

    def still(self, *, question: str) -> None:
        """It has not answered yet; to be called again and again. `question`: what it was asked, or asked for."""
        now = self._clock()
        self._since = now if self._since is None else self._since
        for_s = now - self._since
        if for_s >= SAY_AFTER_S and self._news.due():
            self._said = True
            self._log.warning(f"waiting for {self._whom}", address=self._address, question=question, for_s=round(for_s))

    def there(self) -> None:
        """It has answered."""
        if self._said and self._since is not None:
            self._log.info(f"{self._whom} is there", after_s=round(self._clock() - self._since))
        self._since, self._said = None, False
