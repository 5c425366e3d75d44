"""Tickets that fail one after the other: a server at which nothing works must not use up the tasks of the others."""

import asyncio
from contextlib import suppress

from slipstream.configs.logs import get_log

log = get_log("rollout.setbacks")

USUAL = 16
"""Failures in a row that are none of the server's business, such as prompts that are too long."""
FIRST_S = 0.1
MOST_S = 30.0


class Setbacks:
    """How long the word that a ticket has failed is held back: its credit is not free before, so fewer come.

    Not at all, up to USUAL failures in a row; then twice as long for each further one. A success ends it, also for
    those that are held back by then: whatever all tickets of a moment failed of is over.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._succeeded = asyncio.Event()

    def success(self) -> None:
        """A ticket has come to something."""
        if self._in_a_row > USUAL:
            log.info("tickets succeed again", failed_before=self._in_a_row)
            self._succeeded.set()
            self._succeeded = asyncio.Event()
        self._in_a_row = 0

    async def hold_back(self, reason: str) -> None:
        """A ticket has failed; returns when that may be said."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.failure_s(reason)):
                await self._succeeded.wait()

    def failure_s(self, reason: str) -> float:
        """A ticket has failed; for how many seconds that is held back."""
        self._in_a_row += 1
        further = self._in_a_row - USUAL
        if further <= 0:
            return 0.0
        if further == 1:
            log.warning("nothing but failures, so that few tickets are taken now", in_a_row=USUAL, last=reason)
        return min(MOST_S, FIRST_S * 2.0 ** min(further - 1, 20))
