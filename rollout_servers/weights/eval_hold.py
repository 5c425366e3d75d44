"""Keeps a server on the version that is being evaluated until all answers of its evaluation are generated."""

import asyncio

from slipstream.buffer.wire import messages as m


class EvaluationHold:
    """Condition for applying the next version."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        self._held: int | None = None
        self._drained = -1
        self._released = asyncio.Event()
        self._released.set()

    def hold(self, version: int) -> None:
        """`version` is now running and is to be evaluated."""
        self._held = version
        self._update()

    def started(self, ticket: m.Ticket) -> None:
        """An evaluation ticket is being worked on."""
        self._open.add(ticket.id)
        self._update()

    def answered(self, ticket: m.Ticket) -> None:
        """An evaluation ticket has all its answers, or there will be none; scoring them needs no engine."""
        self._open.discard(ticket.id)
        self._update()

    def drained(self, version: int) -> None:
        """The buffer has no more evaluation tickets of `version`, or of an earlier one, for this server."""
        self._drained = max(version, self._drained)
        self._update()

    async def released(self, deadline_s: float) -> bool:
        """Waits until newer weights may be applied; False if the deadline passed first."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._released.wait()
        except TimeoutError:
            # Given up: what is left of this evaluation must not hold later versions too.
            self._held = None
            self._open.clear()
            self._update()
            return False
        return True

    def _update(self) -> None:
        if self._open or (self._held is not None and self._held > self._drained):
            self._released.clear()
        else:
            self._released.set()
