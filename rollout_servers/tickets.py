"""The tickets that a rollout server holds, and how many it accepts."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from slipstream.configs.runtime.logging import get_log
from slipstream.rollout_servers.engines.base import Pressure

log = get_log("rollout.tickets")

SETTLED_KEPT = 10_000


class TicketBook:
    """Tickets from their arrival until their group is settled; a ticket that arrives twice is accepted once.

    A known id under another grant is another ticket once the first is settled: Redis has lost that one. Before, the
    group of the first serves for both.
    """

    def __init__(self, *, settled_kept: int = SETTLED_KEPT) -> None:
        """Remembers the last `settled_kept` settled tickets."""
        self._settled_kept = settled_kept
        self._held: dict[str, str] = {}
        self._settled: OrderedDict[tuple[str, str], None] = OrderedDict()

    @property
    def held(self) -> list[str]:
        """Ids of tickets whose group is being generated or is not acknowledged, in the order of their arrival."""
        return list(self._held)

    def accept(self, ticket_id: str, grant: str) -> bool:
        """Holds a ticket; False if it is known."""
        if ticket_id in self._held or (ticket_id, grant) in self._settled:
            return False
        self._held[ticket_id] = grant
        return True

    def settle(self, ticket_id: str) -> None:
        """Releases a ticket whose group or failure the buffer has acknowledged."""
        self._settled[ticket_id, self._held.pop(ticket_id)] = None
        if len(self._settled) > self._settled_kept:
            self._settled.popitem(last=False)


FREE_FAILURES = 16
"""Failures in a row without a delay: single tasks may be at fault, such as prompts that are too long."""
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 30.0


class FailureBackoff:
    """Delays the report of a failed ticket, which keeps its credit until then: a broken server is granted fewer.

    The delay doubles with each failure in a row after FREE_FAILURES. A success ends all delays: whatever made the
    tickets of that time fail is over.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._succeeded = asyncio.Event()

    def record_success(self) -> None:
        """Resets the count and releases delayed failures."""
        if self._in_a_row > FREE_FAILURES:
            log.info("tickets succeed again", failed_before=self._in_a_row)
            self._succeeded.set()
            self._succeeded = asyncio.Event()
        self._in_a_row = 0

    async def wait(self, reason: str) -> None:
        """Records a failure; returns when it may be reported."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.record_failure(reason)):
                await self._succeeded.wait()

    def record_failure(self, reason: str) -> float:
        """The delay of this failure's report, in seconds."""
        self._in_a_row += 1
        further = self._in_a_row - FREE_FAILURES
        if further <= 0:
            return 0.0
        if further == 1:
            log.warning("every ticket fails; fewer are taken", in_a_row=FREE_FAILURES, last=reason)
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(further - 1, 20))


FIRST_GROUPS: Final = 3
"""Groups of a server after which a failure of all of them is examined."""
EXAMINED_TASKS: Final = 256
"""Further tasks that must fail likewise before a run ends: a mixture may have few that work."""
REMEDIES: Final[Mapping[str, str]] = {
    "prompt_untokenizable": "change the env's prompts, or the model",
    "prompt_empty": "correct the env, whose prompts are empty",
    "prompt_too_long": "raise rollout.engine.max_model_len, or lower rollout.sampling.max_tokens",
    "image_unreadable": "correct the env's images",
    "image_too_large": "make the env's images smaller",
    "request_refused": "correct what the engine refuses",
}
"""By reasons that depend on a task, the model and the settings alone: such a task fails each time."""


class FirstFailures:
    """The first groups of a server, while all of them fail for the same reason, one of `REMEDIES`."""

    def __init__(self) -> None:
        self._reasons: list[str] | None = []
        """None once it is known that not every task fails."""

    def record_success(self) -> None:
        """A group was generated: some tasks can be played."""
        self._reasons = None

    def record_failure(self, reason: str) -> bool:
        """True for the failure after which other tasks are to be examined."""
        if self._reasons is None:
            return False
        self._reasons.append(reason)
        if reason not in REMEDIES or reason != self._reasons[0]:
            self._reasons = None
            return False
        return len(self._reasons) == FIRST_GROUPS


INCREASE: Final = 1
"""Groups that are added at a time."""
DECREASE: Final = 0.5
"""Factor of the limit when the engine preempted requests, or its KV cache is over KV_CACHE_HIGH."""
KV_CACHE_HIGH: Final = 0.95
"""Share of the KV cache above which the limit falls."""


class ConcurrencyLimiter:
    """Additive increase, multiplicative decrease of the groups in flight.

    A preempted request loses its KV cache and is computed again: more groups at once can mean fewer tokens.
    Source: Chiu & Jain 1989, doi:10.1016/0169-7552(89)90019-6. As in RFC 5681, section 3.2, one congestion lowers the
    limit once: while more groups are in flight than the limit, it stays.

    Attributes:
        limit: groups that may be in flight, from `least` to `most`; at first `most`.
    """

    def __init__(self, least: int, most: int) -> None:
        self._most = most
        self._least = min(least, most)
        self._preemptions = 0
        self.limit = most

    def observe(self, pressure: Pressure, *, groups: int) -> int:
        """The limit after a reading of the engine's pressure with `groups` in flight."""
        pressed = self._preempted(pressure) or pressure.kv_cache_usage > KV_CACHE_HIGH
        if groups <= self.limit:
            wanted = int(self.limit * DECREASE) if pressed else self.limit + INCREASE
            self.limit = max(self._least, min(self._most, wanted))
        return self.limit

    def _preempted(self, pressure: Pressure) -> bool:
        """True if requests were preempted since the last reading; a lower count is that of a new engine."""
        before, self._preemptions = self._preemptions, pressure.preemptions
        return pressure.preemptions != before and pressure.preemptions > 0
