"""The hold of a policy version at a rollout server while it is evaluated."""

import asyncio

from slipstream.buffer.wire import messages as m
from slipstream.configs.runtime.logging import get_log

log = get_log("rollout.evaluation")


class EvaluationHold:
    """Condition for applying the next version; ends by itself after `hold_s`.

    Attributes:
        changed: set when a hold begins or ends; whoever waits for it clears it.
    """

    def __init__(self, *, hold_s: float) -> None:
        self._hold_s = hold_s
        self._open: set[str] = set()
        self._held: int | None = None
        self._drained = -1
        self._expiry: asyncio.TimerHandle | None = None
        self._released = asyncio.Event()
        self._released.set()
        self.changed = asyncio.Event()

    @property
    def active(self) -> bool:
        """True if the present version must stay."""
        return not self._released.is_set()

    @property
    def evaluating(self) -> bool:
        """True while answers of an evaluation are being generated."""
        return bool(self._open)

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

    async def released(self) -> None:
        """Waits until newer weights may be applied."""
        await self._released.wait()

    def _update(self) -> None:
        active = bool(self._open) or (self._held is not None and self._held > self._drained)
        if active == self.active:
            return
        self.changed.set()
        if active:
            self._released.clear()
            self._expiry = asyncio.get_running_loop().call_later(self._hold_s, self._expire)
        else:
            self._released.set()
            if self._expiry is not None:
                self._expiry.cancel()

    def _expire(self) -> None:
        log.warning(
            "evaluation not finished in time: newer weights may interrupt it",
            hold_s=self._hold_s,
            tickets=sorted(self._open),
            remedy="a larger eval.hold_s, or fewer tasks (eval.tasks)",
        )
        # What is left of this evaluation must not hold later versions too.
        self._held = None
        self._open.clear()
        self._update()
