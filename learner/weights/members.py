"""Members of the weight channel (rollout servers that join, leave, are evicted), and fault attribution. No sockets."""

import asyncio
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.buffer.wire.weights import protocol as w
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.weights import TRANSPORTS

log = get_log("learner.weights")

SILENT_S = 15.0
"""A server that puts weights into its engine, or starts another one, may be too busy for its heartbeat for a while."""
INBOX = 16
"""More than a transfer has requests; bounds the memory of a flooding server."""


class Absent(SlipstreamError):
    """The member was evicted, has left, or came back with another engine."""


class Failing(Absent):
    """The member was evicted because it reported a failure."""


@dataclass
class Record:
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
    """Its last heartbeat."""
    heard_at: float
    version: int
    """The version that it last reported to generate with."""
    staged: int
    """The version whose bytes it last reported to keep."""
    record: Record
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
        """True if it keeps its version for an evaluation: no other is sent to it."""
        return self.join.holding

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
        self._records: dict[str, Record] = {}
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
        record = self._records.setdefault(join.server, Record())
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
        if not member.inbox.full():
            member.inbox.put_nowait(None)  # wakes the request that waits for an answer


def choose_transport(member: Member, available: Sequence[str], *, host: str, late: bool) -> str | None:
    """The first of the learner's transports that a member can use; None if there is none.

    Args:
        available: in the order of preference.
        host: identity of the learner's host, for shared memory.
        late: the others have the version already, so it must come without a transfer group.
    """
    for name in available:
        if name not in member.join.transports or time.monotonic() < member.record.avoided.get(name, 0.0):
            continue
        transport = TRANSPORTS[name]
        if (transport.in_place and member.join.host != host) or (late and transport.broadcast):
            continue
        return name
    return None


CHECK = "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME there, firewalls between it, the learner and the other servers"


def admitted(members: Sequence[Member], version: int) -> list[Member]:
    """Those of the members that a version may be broadcast to; the others fetch it."""
    willing = [member for member in members if member.record.broadcast_from <= version]
    doubtful = sorted(
        (member for member in willing if member.suspects), key=lambda member: (member.record.breaks, member.suspects)
    )
    put_off = doubtful[max(1, doubtful[0].suspects // 2) :] if doubtful else []
    return [member for member in willing if member not in put_off]


def next_group(
    willing: Sequence[Member], formed: Collection[Member], *, others_fetch: bool, patience_s: float
) -> list[Member]:
    """Members of the next broadcast: newcomers wait for each other, so that all enter in one re-forming.

    Args:
        willing: members at rest that the version may be broadcast to.
        formed: members of the process group that exists. If one of them is gone, it is re-formed anyway.
        others_fetch: more newcomers are still fetching an earlier version.
        patience_s: no newcomer waits longer than this since it joined.
    """
    newcomers = [member for member in willing if member not in formed]
    stands = bool(formed) and not any(member.gone.is_set() for member in formed)
    if stands and others_fetch and all(time.monotonic() - each.joined_at < patience_s for each in newcomers):
        return [member for member in willing if member in formed]
    return list(willing)


def record_success(members: Sequence[Member]) -> None:
    """A broadcast reached all of them."""
    for member in members:
        if member.record.breaks:
            log.info("broadcasts reach a rollout server again", server=member.name)
        member.proven, member.suspects, member.record.breaks = True, 0, 0


def attribute_fault(members: Sequence[Member], done: Collection[Member], next_version: int, reason: str) -> None:
    """Attributes a broadcast that broke off to members.

    Args:
        done: who did its part of the step at which the broadcast broke off; the others may also be victims of one.
        next_version: the first that is broadcast again.
    """
    not_done = [member for member in members if member not in done]
    # Who was reached before is rather the victim of one that never was.
    suspects = [member for member in not_done if not member.proven] or not_done
    for member in suspects:
        member.proven, member.suspects = False, len(suspects)
    if len(suspects) == 1:
        record_fault(suspects[0], next_version, reason)


def record_fault(member: Member, next_version: int, reason: str) -> None:
    """A broadcast broke off at this member: it fetches for a while, from `next_version` on."""
    record = member.record
    record.breaks += 1
    record.broadcast_from = next_version + 2 ** (record.breaks - 1)
    if record.breaks == 1:
        log.warning(
            "broadcasts don't reach a rollout server: it fetches its weights instead",
            server=member.name,
            reason=reason,
            tried_again_at_version=record.broadcast_from,
            check=CHECK,
        )
