"""Members of the weight channel: rollout servers that join, leave, are evicted; requests to them; turns to fetch."""

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from slipstream.buffer.wire.codec import encode
from slipstream.buffer.wire.messages import Message
from slipstream.buffer.wire.weights import protocol as w
from slipstream.buffer.wire.weights.fabric import TransferError
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.weights import TRANSPORTS

log = get_log("learner.weights")

SILENT_S = 15.0
"""A server that puts weights into its engine, or starts another one, may be too busy for its heartbeat for a while."""
INBOX = 16
"""More than a transfer has requests; bounds the memory of a flooding server."""
KEPT = 10_000
"""Most metrics of each kind: a run may last weeks."""
QUIET_S = 2.0
"""Time without a heartbeat after which the connection is tested: a dead process has none."""
CHECK_S = 1.0
GRACE_S = 2.0
SLOTS = 4
"""Fetches at a time while the rate is unknown."""
DEADLINE_SHARE = 0.5
"""Fetches at a time take at most this share of a deadline, at the measured rate."""
MEASURED_BYTES = 8 << 20
"""Smallest fetch that gives a rate: in smaller ones latency dominates."""

Answer = TypeVar("Answer", w.Entered, w.Ready, w.Loaded, w.Applied)


class Absent(SlipstreamError):
    """The member was evicted, has left, or came back with another engine."""


class Failing(Absent):
    """The member was evicted because it reported a failure."""


@dataclass
class ServerRecord:
    """State of a server that outlives its membership."""

    evictions: int = 0
    """In a row: an update that succeeds starts the count anew."""
    away_until: float = 0.0
    incarnation: str = ""
    """The engine that it was evicted with last: another one need not stay away."""
    avoided: dict[str, float] = field(default_factory=dict)
    """Transports that it could not fetch through, and until when they are not tried again."""
    breaks: int = 0
    """Broadcasts that broke off at it, in a row."""
    broadcast_from: int = 0
    """The first version that it may receive by broadcast again."""
    overtaken: int = 0
    """Versions in a row that were gone before it had fetched them, because there were later ones."""


@dataclass(eq=False)
class Member:
    """A rollout server that is subscribed to versions."""

    peer: bytes
    join: w.Join
    """The latest heartbeat of the server."""
    heard_at: float
    version: int
    """The version that it last reported to generate with."""
    staged: int
    """The version whose bytes it last reported to keep."""
    record: ServerRecord
    state: str = "joined"
    joined_at: float = field(default_factory=time.monotonic)
    proven: bool = False
    """A broadcast has reached it since it joined, and it was not suspected of breaking one off afterwards."""
    queued_at: float | None = None
    """Start of its wait for a fetch through `stream`."""
    suspects: int = 0
    """Members that were suspected, it among them, when a broadcast last broke off; 0 once one has reached it."""
    transfer: int = -1
    """The transfer that its answers are awaited for."""
    inbox: "asyncio.Queue[Any]" = field(default_factory=lambda: asyncio.Queue(INBOX))
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""
    """Why it is gone."""

    @property
    def name(self) -> str:
        """The server's name."""
        return self.join.server

    @property
    def holding(self) -> bool:
        """True if it keeps its version for an evaluation: no other is sent to it. One that is silent may be dead."""
        return self.join.holding and self.silent_s <= SILENT_S

    @property
    def silent_s(self) -> float:
        """Seconds since its last heartbeat."""
        return time.monotonic() - self.heard_at


class Roster:
    """The members, by their address."""

    def __init__(self, run: str, *, deadline_s: float) -> None:
        """Args:
        deadline_s: what waiting in vain costs; who makes others wait again and again stays out in multiples of it.
        """
        self._run = run
        self._deadline_s = deadline_s
        self._members: dict[bytes, Member] = {}
        self._records: dict[str, ServerRecord] = {}
        self._without_engine: dict[bytes, float] = {}  # and when each was heard last
        self.evictions = 0

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    @property
    def without_engine(self) -> int:
        """Servers that are no members because their engine is dead, and is started again."""
        since = time.monotonic() - SILENT_S
        return sum(heard_at >= since for heard_at in list(self._without_engine.values()))  # any thread may ask

    def of(self, peer: bytes) -> Member | None:
        """The member at an address."""
        return self._members.get(peer)

    def receive_join(self, peer: bytes, join: w.Join) -> bool:
        """A heartbeat; whether it changes who is a member, with which engine, or whether it keeps its version."""
        if join.run != self._run:
            return False
        member = self._members.get(peer)
        if member is not None and member.join.incarnation == join.incarnation:
            was_holding = member.holding
            member.join, member.heard_at, member.staged = join, time.monotonic(), join.staged
            return member.holding != was_holding
        if member is not None:
            self._remove(member, "its engine died")
            log.info("engine of a rollout server died", server=member.name)
        if not join.incarnation:
            is_news = peer not in self._without_engine
            self._without_engine[peer] = time.monotonic()
            return is_news
        self._without_engine.pop(peer, None)
        record = self._records.setdefault(join.server, ServerRecord())
        if join.incarnation == record.incarnation and time.monotonic() < record.away_until:
            return member is not None
        self._members[peer] = Member(peer, join, time.monotonic(), join.version, join.staged, record)
        log.info("rollout server joined", server=join.server, version=join.version, transports=join.transports)
        return True

    def receive_leave(self, peer: bytes) -> None:
        """A server ended as requested."""
        self._without_engine.pop(peer, None)
        member = self._members.get(peer)
        if member is not None:
            self._remove(member, "left")
            self._records.pop(member.name, None)  # when it is started again, whatever was wrong may be put right
            log.info("rollout server left", server=member.name)

    def evict(self, member: Member, reason: str, *, at_fault: bool = True) -> float:
        """Takes a server out; returns after how many seconds it may join again.

        The first time that is at once, for it may just have been slow; then one deadline, and twice as long each time,
        so that a server which never gets an update done costs the others less and less. Where it is not `at_fault`,
        that is one deadline each time. With another engine it may join at once.
        """
        if member.gone.is_set():
            return 0.0
        self._remove(member, reason)
        self.evictions += 1
        record = member.record
        retry_s = self._deadline_s
        if at_fault:
            record.evictions += 1
            retry_s *= 0.0 if record.evictions == 1 else 2.0 ** min(record.evictions - 2, 6)
        record.away_until, record.incarnation = time.monotonic() + retry_s, member.join.incarnation
        log.warning("rollout server evicted", server=member.name, state=member.state, reason=reason, retry_s=retry_s)
        return retry_s

    def applied(self, member: Member, version: int) -> None:
        """An update succeeded; earlier evictions are forgotten."""
        member.version = version
        member.state = "at rest"
        member.record.evictions = 0

    def _remove(self, member: Member, reason: str) -> None:
        self._members.pop(member.peer, None)
        member.reason = reason
        member.gone.set()
        if not member.inbox.full():
            member.inbox.put_nowait(None)  # wakes the request that waits for an answer


def choose_transport(
    member: Member, available: Sequence[str], *, host: str, device: str = "", late: bool
) -> str | None:
    """The first of the learner's transports that a member can use; None if there is none.

    Args:
        available: in the order of preference.
        host: identity of the learner's host, for shared memory.
        device: identity of its GPU, or of its host again.
        late: the others have the version already, so it must come without a transfer group.
    """
    for name in available:
        if name not in member.join.transports or time.monotonic() < member.record.avoided.get(name, 0.0):
            continue
        transport = TRANSPORTS[name]
        if (transport.in_place and member.join.host != host) or (late and transport.broadcast):
            continue
        if transport.on_device and member.join.device != device:
            continue
        return name
    return None


@dataclass
class SyncMetrics:
    """Metrics of the latest publications; read by the training loop."""

    published_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """From the call of `publish` until each member of that moment had applied the version, or was evicted."""
    stalls_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """Pause of each server's generation."""
    deviations: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """Deviation of each probe's log-probs, by which a server verified its engine's weights."""
    members: int = 0
    """Current members."""
    evictions: int = 0
    unreached: int = 0
    """Members at which broadcasts broke off, so that they fetch instead."""


class Rpc:
    """Requests to rollout servers and their answers, on the control plane."""

    def __init__(self, socket: zmq.asyncio.Socket, roster: Roster, *, deadline_s: float) -> None:
        self._socket = socket
        self._roster = roster
        self.deadline_s = deadline_s
        # Random start: an answer to an earlier learner must not match.
        self._transfers = itertools.count(random.SystemRandom().getrandbits(52))

    def begin(self, members: Sequence[Member]) -> int:
        """Number of a new transfer with these members; answers to their earlier ones are dropped from now on."""
        transfer = next(self._transfers)
        for member in members:
            member.transfer = transfer
            member.inbox = asyncio.Queue(member.inbox.maxsize)
        return transfer

    def receive(self, peer: bytes, message: Any) -> None:
        """Passes an answer to the request that waits for it."""
        member = self._roster.of(peer)
        if member is not None and message.transfer == member.transfer and not member.inbox.full():
            member.inbox.put_nowait(message)

    async def send(self, member: Member, message: Message) -> None:
        """Raises: Absent when the member is gone."""
        if member.gone.is_set():
            raise Absent(f"{member.name}: {member.reason}")
        try:
            await self._socket.send_multipart([member.peer, encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise await self.evict(member, f"connection gone, {type(message).__name__} could not be sent") from None

    async def expect(
        self,
        member: Member,
        kind: type[Answer],
        *,
        state: str,
        version: int | None = None,
        in_step: bool = False,
        superseded: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """The next answer of a member, which must be of this kind and for this version.

        Args:
            in_step: other members take part, so that one of them may be the cause if this one fails or is late.
            superseded: whether there is a later version by now, which may have replaced the one that it fetches.

        Raises: Absent when the member is evicted, for a wrong answer or for none within the deadline, or is gone;
        Failing when it is evicted because it reported a failure; TransferError instead of both where `in_step`, and
        where the source is gone because the version was `superseded`.
        """
        member.state = state
        # The transport's own deadline comes first: its error names the absent ranks.
        deadline_s = self.deadline_s + (GRACE_S if in_step else 0.0)
        try:
            answer = await self._next(member, deadline_s, may_hold=kind in (w.Ready, w.Applied))
        except TimeoutError:
            late = f"no answer for {self.deadline_s:.0f} s while {state}"
            if in_step:
                raise TransferError(f"{member.name}: {late}") from None
            raise await self.evict(member, late) from None
        if isinstance(answer, w.Failed):
            failure = f"{answer.stage} failed: {answer.detail}"
            if in_step or (answer.gone and superseded()):
                raise TransferError(f"{member.name}: {failure}")
            raise Failing(str(await self.evict(member, failure)))
        if not isinstance(answer, kind):
            due, came = kind.__name__, type(answer).__name__
            raise await self.evict(member, f"answered {came} while {due} was due")
        answered = getattr(answer, "version", version)
        if version is not None and answered != version:
            raise await self.evict(member, f"answered {kind.__name__} for version {answered}, not for {version}")
        return answer

    async def evict(self, member: Member, reason: str, *, at_fault: bool = True) -> Absent:
        """Evicts a member, as `Roster.evict` does, and notifies it; returns the error to raise."""
        if not member.gone.is_set():
            retry_s = self._roster.evict(member, reason, at_fault=at_fault)
            try:
                await self._socket.send_multipart([member.peer, encode(w.Evicted(reason=reason, retry_s=retry_s))])
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
        return Absent(f"{member.name}: {member.reason}")

    async def _next(self, member: Member, deadline_s: float, *, may_hold: bool) -> Any:
        """The next answer.

        Args:
            may_hold: the deadline starts again when the member has finished an evaluation.

        Raises: TimeoutError at the deadline, Absent when the member is gone or has been silent for long.
        """
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        while True:
            silent = member.silent_s > SILENT_S
            if may_hold and member.holding:
                asked_at = loop.time()
            left_s = deadline_s - (loop.time() - asked_at)
            answer = None
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(CHECK_S, left_s))):
                    answer = await member.inbox.get()
            if answer is not None:
                return answer
            if member.gone.is_set():
                raise Absent(f"{member.name}: {member.reason}")
            if member.silent_s > QUIET_S:
                await self.send(member, w.Ping())
            # Checked twice: after a pause of this process, heartbeats may be waiting in the socket.
            if silent and member.silent_s > SILENT_S:
                raise await self.evict(member, f"silent for {member.silent_s:.0f} s while {member.state}")
            if left_s <= 0:
                raise TimeoutError


class FetchQueue:
    """The members that fetch, and those that wait: the deadline of a fetch starts when it is admitted."""

    def __init__(self, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._size_bytes = 0
        self._waiting: dict[Member, asyncio.Future[None]] = {}
        self._fetching: set[Member] = set()
        self._rate: float | None = None

    def offer(self, size_bytes: int) -> None:
        """Sets the size of the version that is fetched from now on."""
        self._size_bytes = size_bytes

    @property
    def slots(self) -> int:
        """Fetches at a time."""
        if self._rate is None or not self._size_bytes:
            return SLOTS
        return max(1, int(self._rate * self._deadline_s * DEADLINE_SHARE / self._size_bytes))

    @property
    def waiting(self) -> int:
        """Members in the queue."""
        return len(self._waiting)

    def enter(self, member: Member) -> "asyncio.Future[None]":
        """Queues a member. The future is done when its fetch is admitted, or raises Absent.

        A member that has waited before, for a version that was superseded meanwhile, keeps its place.
        """
        if member.queued_at is None:
            member.queued_at = time.monotonic()
        granted = self._waiting[member] = asyncio.Future()
        self._grant()
        return granted

    def leave(self, member: Member) -> None:
        """Ends a member's wait or fetch."""
        self._waiting.pop(member, None)
        self._fetching.discard(member)
        self._grant()

    def measure(self, sent_bytes: int, seconds: float) -> None:
        """Takes in what the learner sent to all members while one of them fetched."""
        if sent_bytes >= MEASURED_BYTES:
            rate = sent_bytes / seconds
            self._rate = rate if self._rate is None else (self._rate + rate) / 2

    def _grant(self) -> None:
        for member in sorted(self._waiting, key=lambda member: member.queued_at or 0.0):
            granted = self._waiting[member]
            if member.gone.is_set() and not granted.done():
                granted.set_exception(Absent(f"{member.name}: {member.reason}"))
            elif len(self._fetching) < self.slots and not granted.done():
                self._fetching.add(member)
                granted.set_result(None)
            if granted.done():  # perhaps cancelled
                del self._waiting[member]
