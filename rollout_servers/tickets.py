"""The tickets of a rollout server: which it holds, and the outbox of their groups and failures."""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode, encode_group
from slipstream.configs.runtime.logging import get_log
from slipstream.rollout_servers.tally import Tally

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
        self._held: dict[str, tuple[str, Tally]] = {}
        self._settled: OrderedDict[tuple[str, str], None] = OrderedDict()

    @property
    def held(self) -> list[str]:
        """Ids of tickets whose group is being generated or is not acknowledged, in the order of their arrival."""
        return list(self._held)

    @property
    def sampled(self) -> m.Sampled:
        """Tokens so far of these tickets; those without any are left out."""
        sampled: m.Sampled = {}
        for ticket_id, (_, tally) in self._held.items():
            if tally.env is not None and (tokens := tally.sampled):
                sampled.setdefault(tally.env, {})[ticket_id] = tokens
        return sampled

    def accept(self, ticket_id: str, grant: str, *, taken_over: int = 0) -> Tally | None:
        """Holds a ticket; returns the tally for its tokens, None if the ticket is known.

        Args:
            taken_over: tokens that an earlier server has sampled for it.
        """
        if ticket_id in self._held or (ticket_id, grant) in self._settled:
            return None
        tally = Tally(taken_over=taken_over)
        self._held[ticket_id] = grant, tally
        return tally

    def settle(self, ticket_id: str) -> None:
        """Releases a ticket whose group or failure the buffer has acknowledged."""
        self._settled[ticket_id, self._held.pop(ticket_id)[0]] = None
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


RESEND_S = 2.0
"""Time after which an unacknowledged message makes the server send a hello; see `Outbox`."""
GROUPS_PER_MESSAGE = 64
LEAST_WINDOW_BYTES = 16 << 10
MOST_WINDOW_BYTES = 8 << 20
"""Largest window: as much as the buffer stores at once."""
SLOW_ACK_S = 1.0
"""An acknowledgement that takes so much longer than a small message's shrinks the window."""

Send = Callable[[Sequence[bytes]], Awaitable[None]]


@dataclass
class Unacknowledged:
    """An encoded group, failure or event that the buffer has not acknowledged."""

    frame: bytes
    is_group: bool
    sampled: m.Sampled = field(default_factory=dict)
    """Of its ticket."""
    sent_at: float = math.inf
    kept: asyncio.Future[str] | None = None
    """Of an event: gets the outcome."""


class Outbox:
    """Bounded by the server's credits: a ticket keeps its credit until its group is acknowledged.

    A window limits the bytes of groups in flight, to at least one group: heartbeats queue behind them, and the network
    may be slow. As in TCP's slow start (RFC 5681, section 3.1) it begins small and grows by what is acknowledged.
    Events have MOST_WINDOW_BYTES of their own: agents wait for them, and a steady stream of them must not delay groups.

    An overdue message may be lost, or wait in the socket's queue, where copies would pile up. The reply to a hello
    decides: the buffer handles messages in order, so what was sent before that hello and is unacknowledged is lost.
    """

    def __init__(self, send: Send, *, resend_s: float) -> None:
        self._send = send
        self._resend_s = resend_s
        self._waiting: dict[str, Unacknowledged] = {}
        self._inflight: dict[str, Unacknowledged] = {}
        self._window_bytes = LEAST_WINDOW_BYTES
        self._shortest_ack_s = 0.0
        self._wake = asyncio.Event()
        self._hello_at = math.inf
        self._received_at = _now()

    @property
    def overdue(self) -> bool:
        """True if a message was not acknowledged in time."""
        now = _now()
        return any(now - item.sent_at > self._resend_s for item in self._inflight.values())

    @property
    def silence_s(self) -> float:
        """Seconds since the last message from the buffer."""
        return _now() - self._received_at

    def record_receipt(self) -> None:
        """A message of any kind came from the buffer."""
        self._received_at = _now()

    def deliver(self, group: m.Group, sampled: m.Sampled) -> None:
        """Queues a finished group, with the tokens of its ticket."""
        self._put(group.id, Unacknowledged(encode_group(group), is_group=True, sampled=sampled))

    def fail(self, failure: m.GroupFailed) -> None:
        """Queues the failure of a ticket."""
        self._put(failure.id, Unacknowledged(encode(failure), is_group=False))

    def keep(self, event: m.KeepEvent) -> asyncio.Future[str]:
        """Queues an event; the result is its outcome, once it is acknowledged."""
        kept: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._put(event.name, Unacknowledged(encode(event), is_group=False, kept=kept))
        return kept

    def acknowledge(self, outcomes: dict[str, str]) -> list[str]:
        """Drops acknowledged messages and returns the ids of groups; those with the outcome `again` are sent again."""
        before_bytes, was_alone = self._inflight_bytes, len(self._inflight) == 1
        dropped, void, first_sent_at = list[str](), list[str](), math.inf
        for group_id, outcome in outcomes.items():
            item = self._inflight.pop(group_id, None) or self._waiting.pop(group_id, None)
            if item is None:
                continue
            if item.kept is not None:
                if not item.kept.done():
                    item.kept.set_result(outcome)
                continue
            first_sent_at = min(first_sent_at, item.sent_at)
            if outcome == m.AGAIN:
                self._waiting[group_id] = item
                continue
            dropped.append(group_id)
            if outcome == "void":
                void.append(group_id)
        if void:
            log.warning("groups refused: their tickets were void", groups=void)
        if first_sent_at < math.inf:
            took_s = _now() - first_sent_at
            if was_alone or before_bytes <= LEAST_WINDOW_BYTES:
                self._shortest_ack_s = max(0.0, took_s)
            self._fit_window(before_bytes, took_s=took_s)
        self._wake.set()
        return dropped

    def record_hello(self) -> None:
        """A hello is about to be sent; repetitions of an unanswered one do not count."""
        self._hello_at = min(self._hello_at, _now())

    def resend_lost(self) -> None:
        """The buffer has replied to a hello: sends again what went out before the first one and is unacknowledged."""
        lost = {group_id: item for group_id, item in self._inflight.items() if item.sent_at <= self._hello_at}
        self._inflight = {group_id: item for group_id, item in self._inflight.items() if group_id not in lost}
        self._waiting = lost | self._waiting
        self._window_bytes = LEAST_WINDOW_BYTES
        self._hello_at = math.inf
        self._wake.set()

    async def run(self) -> None:
        """Sends until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while ids := self._next():
                items = {group_id: self._waiting.pop(group_id) for group_id in ids}
                for item in items.values():
                    item.sent_at = _now()
                self._inflight |= items
                sampled = _merged(item.sampled for item in items.values())
                head = [encode(m.Deliver(ids=ids, sampled=sampled))] if items[ids[0]].is_group else []
                await self._send(head + [item.frame for item in items.values()])

    @property
    def _inflight_bytes(self) -> int:
        return sum(len(item.frame) for item in self._inflight.values() if item.kept is None)

    def _fit_window(self, before_bytes: int, *, took_s: float) -> None:
        """Adapts the window to an acknowledgement that came after `took_s`, with `before_bytes` in flight before it."""
        left_bytes = self._inflight_bytes
        grown_bytes = max(self._window_bytes, before_bytes + (before_bytes - left_bytes))
        fitting_bytes = left_bytes if took_s > self._shortest_ack_s + SLOW_ACK_S else grown_bytes
        self._window_bytes = min(MOST_WINDOW_BYTES, max(LEAST_WINDOW_BYTES, fitting_bytes))

    def _put(self, group_id: str, item: Unacknowledged) -> None:
        self._waiting[group_id] = item
        self._wake.set()

    def _next(self) -> list[str]:
        """Ids that may be sent now as one message: one failure or event, or groups within the window."""
        events_bytes = sum(len(item.frame) for item in self._inflight.values() if item.kept is not None)
        has_room = True
        for group_id, item in self._waiting.items():
            if item.kept is not None:
                has_room = has_room and events_bytes + len(item.frame) <= MOST_WINDOW_BYTES  # in their order
            if not item.is_group and (item.kept is None or has_room):
                return [group_id]
        ids = list[str]()
        room_bytes = self._window_bytes - self._inflight_bytes
        is_idle = all(item.kept is not None for item in self._inflight.values())
        for group_id, item in self._waiting.items():
            if not item.is_group:
                continue
            room_bytes -= len(item.frame)
            is_first = not ids and is_idle
            if len(ids) == GROUPS_PER_MESSAGE or (room_bytes < 0 and not is_first):
                break
            ids.append(group_id)
        return ids


def _merged(parts: Iterable[m.Sampled]) -> m.Sampled:
    merged: m.Sampled = {}
    for part in parts:
        for env, tickets in part.items():
            merged.setdefault(env, {}).update(tickets)
    return merged


def _now() -> float:
    return asyncio.get_running_loop().time()
