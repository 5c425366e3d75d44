"""Messages of rollout servers: hello, goodbye, deliveries, failed tickets. Heartbeats: `fleet.py`."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from slipstream.buffer import identity
from slipstream.buffer.handlers.fleet import Fleet
from slipstream.buffer.handlers.inspection import (
    FUTURE_VERSION,
    OTHER_TICKET,
    OUT_OF_VOCABULARY,
    Dropped,
    EvalSliceResult,
    Inspected,
    InvalidGroupError,
)
from slipstream.buffer.handlers.peers import MalformedCounter, Send, peer_name
from slipstream.buffer.policies.curriculum import Place
from slipstream.buffer.policies.statistics import histogram
from slipstream.buffer.store.account import origin_of
from slipstream.buffer.store.ledger import STORED_AT_ONCE, STORED_AT_ONCE_BYTES, Ledger
from slipstream.buffer.store.redis import MemoryGuard
from slipstream.buffer.store.types import DeliveredGroup, Facts, Origin
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import FrameError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.tracing import span

log = get_log("buffer.rollout")

MAX_SERVERS = 10_000
MALFORMED_RETRIES = 3
"""Times that a refused group is requested again: the network may have damaged it."""


@dataclass(frozen=True)
class Delivery:
    """A delivery whose groups are not stored yet."""

    peer: bytes
    train_tasks: int
    """Train tasks of the sender's env."""
    outcomes: dict[str, str]
    """Outcomes of the groups that are neither stored nor dropped with others."""
    groups: list[Inspected]
    """The others: to be stored, or dropped, unless they are not those of their tickets."""


class Ingest:
    """Stores delivered groups in batches, then acknowledges them.

    A group lost here by a failure was not acknowledged, so its sender still has it and sends it again.
    """

    def __init__(
        self, ledger: Ledger, fleet: Fleet, malformed: MalformedCounter, memory: MemoryGuard, send: Send
    ) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._malformed = malformed
        self._memory = memory
        self._send = send
        self._waiting: list[Delivery] = []
        self._groups = self._bytes = 0
        self._storing = asyncio.Lock()

    async def take(self, peer: bytes, groups: Sequence[Inspected], *, vocab_size: int, train_tasks: int) -> None:
        """Queues a delivery for `store`, which runs at once if the queue is long.

        Args:
            vocab_size: the model's number of token ids; a group with another token id is refused.
            train_tasks: tasks of the peer's env to train on.
        """
        within = [_within(group, vocab_size) for group in groups]
        await self._memory.attempt(self._take(Delivery(peer, train_tasks, {}, []), within))

    async def store(self) -> None:
        """Stores and acknowledges all queued deliveries, unless Redis is full."""
        await self._memory.attempt(self._store())

    async def _take(self, delivery: Delivery, groups: Sequence[Inspected]) -> None:
        for group in groups:
            if isinstance(group.result, DeliveredGroup | Dropped):
                delivery.groups.append(group)
            else:
                delivery.outcomes[group.id] = await self._not_stored(group.id, group.result, group.origin)
        self._waiting.append(delivery)
        self._groups += len(delivery.groups)
        results = [group.result for group in delivery.groups]
        self._bytes += sum(len(result.blob) for result in results if isinstance(result, DeliveredGroup))
        if self._groups >= STORED_AT_ONCE or self._bytes >= STORED_AT_ONCE_BYTES:
            await self._store()

    async def _store(self) -> None:
        async with self._storing:
            waiting, self._waiting = self._waiting, []
            self._groups = self._bytes = 0
            with span("store") as traced:
                groups = await self._sort_out(waiting)
                delivered = await self._ledger.deliver(groups)
                traced.note(groups=[group.id for group in groups])
            stored = {group.id: outcome for group, outcome in zip(groups, delivered, strict=True)}
            origins = {group.id: group.origin for group in groups}
            lost = [group_id for group_id, outcome in stored.items() if outcome == m.AGAIN]
            if lost:
                log.warning("Redis lost the bytes of arriving groups, requesting them again", groups=lost)
            for group_id in [group_id for group_id, outcome in stored.items() if outcome == "future"]:
                error = InvalidGroupError(FUTURE_VERSION, f"group {group_id}: a policy version that was not published")
                stored[group_id] = await self._not_stored(group_id, error, origins[group_id])
            for delivery in waiting:
                outcomes = {group.id: stored[group.id] for group in delivery.groups if group.id in stored}
                outcomes |= delivery.outcomes
                generated = sum(outcome in ("ready", "filtered") for outcome in outcomes.values())
                self._fleet.ticket_returned(delivery.peer, delivered=generated)
                await self._send(delivery.peer, m.Acknowledge(outcomes=outcomes))

    async def _sort_out(self, waiting: Sequence[Delivery]) -> list[DeliveredGroup]:
        """The groups to store; those that a filter drops or that have another task than their ticket get an outcome."""
        places = await self._ledger.places([group.id for delivery in waiting for group in delivery.groups])
        groups: list[DeliveredGroup] = []
        for delivery in waiting:
            for group in delivery.groups:
                result = self._other_ticket(group, places.get(group.id), delivery.train_tasks) or group.result
                if isinstance(result, DeliveredGroup):
                    groups.append(result)
                else:
                    delivery.outcomes[group.id] = await self._not_stored(group.id, result, group.origin)
        return groups

    def _other_ticket(self, group: Inspected, place: Place | None, train_tasks: int) -> InvalidGroupError | None:
        """The error of a group whose task is not that of its ticket, which is at `place`; None: not in flight."""
        if place is None:
            return None
        epoch, task = place[0], self._fleet.task(*place, train_tasks=train_tasks)
        if (group.epoch, group.task) == (epoch, task):
            return None
        detail = f"group {group.id}: task {group.task} of epoch {group.epoch}, but its ticket has {task} of {epoch}"
        return InvalidGroupError(OTHER_TICKET, detail)

    async def _not_stored(self, group_id: str, result: EvalSliceResult | Dropped | FrameError, origin: Origin) -> str:
        """The outcome of a group that is not stored with the others."""
        match result:
            case EvalSliceResult():
                return await self._ledger.evaluations.record(
                    result.work,
                    version=result.version,
                    failures=result.failures,
                    tallies=result.tallies,
                    blob=result.blob,
                    origin=origin,
                    tokens=result.tokens,
                    lost=result.unused,
                )
            case Dropped():
                return await self._ledger.filter(group_id, reason=result.reason, facts=result.facts, origin=origin)
            case FrameError():
                outcome = await self._reject(group_id, result.reason, origin)
                self._malformed.add("group refused", group=group_id, code=result.reason, reason=str(result))
                if outcome == "filtered":  # a slice of an evaluation may go to another server
                    self._fleet.offer_evaluation()
                return outcome

    async def _reject(self, group_id: str, reason: str, origin: Origin) -> str:
        lost = {reason: origin.sampled}
        # A malformed group has no readable kind, so first try it as a slice of an evaluation.
        outcome = await self._ledger.evaluations.record_failure(
            group_id, reason=reason, ignored_failures=MALFORMED_RETRIES, origin=origin, lost=lost
        )
        if outcome != "void":
            return outcome
        return await self._ledger.filter(
            group_id, reason=reason, facts=Facts(lost=lost), origin=origin, ignored_failures=MALFORMED_RETRIES
        )


class EventKeeper:
    """Keeps events of episodes, all that have arrived at once, then acknowledges them.

    One that is lost here by a failure was not acknowledged: its sender sends it again.
    """

    def __init__(self, ledger: Ledger, memory: MemoryGuard, send: Send) -> None:
        self._ledger = ledger
        self._memory = memory
        self._send = send
        self._waiting: list[tuple[bytes, m.KeepEvent]] = []

    def take(self, peer: bytes, message: m.KeepEvent) -> None:
        """Queues an event for `keep`."""
        self._waiting.append((peer, message))

    async def keep(self) -> None:
        """Keeps and acknowledges all queued events, unless Redis is full."""
        waiting, self._waiting = self._waiting, []
        named = [(peer_name(peer), message) for peer, message in waiting]
        outcomes = await self._memory.attempt(self._ledger.keep_events(named))
        by_peer: dict[bytes, dict[str, str]] = {}
        for (peer, message), outcome in zip(waiting, outcomes or (), strict=False):
            by_peer.setdefault(peer, {})[message.name] = outcome
        for peer, kept in by_peer.items():
            await self._send(peer, m.Acknowledge(outcomes=kept))


def _within(group: Inspected, vocab_size: int) -> Inspected:
    """The inspected group, refused if it has a token id outside the model's vocabulary."""
    if group.largest_token < vocab_size:
        return group
    detail = f"group {group.id}: token id {group.largest_token} is outside the vocabulary of {vocab_size}"
    return Inspected(group.id, InvalidGroupError(OUT_OF_VOCABULARY, detail), group.origin)


class RolloutHandler:
    """Handles hello, goodbye and failed tickets."""

    def __init__(self, settings: Mapping[str, str], ledger: Ledger, fleet: Fleet, ingest: Ingest, send: Send) -> None:
        """`settings` must be the same on every server; others that a server reports, the same on all servers."""
        self._settings = settings
        self._ledger = ledger
        self._fleet = fleet
        self._ingest = ingest
        self._send = send
        self._refused: m.ServerHello | None = None

    async def hello(self, peer: bytes, hello: m.ServerHello) -> None:
        """Registers a server, or refuses it. Raises: ConfigError (`require_unknown_incarnation`)."""
        await self._ingest.store()  # the answer implies that all groups delivered before the hello were handled
        servers = self._fleet.servers
        known = servers.get(peer)
        if known is not None and known.hello == hello:  # after an outage, thousands of these may be queued
            await self._send(peer, m.Welcome(version=await self._ledger.version()))
            known.offer_evaluation()
            return
        refusal = await self._refusal(peer, hello)
        if peer not in servers and len(servers) >= MAX_SERVERS:
            refusal = (
                f"this buffer has {MAX_SERVERS} servers already; silent ones are removed after buffer.server_deadline_s"
            )
        if refusal:
            if self._refused != hello:  # a server's repeated hellos are logged once
                log.warning("server refused", peer=peer_name(peer), reason=refusal)
            self._refused = hello
            await self._send(peer, m.Refused(reason=refusal))
            return
        lost = await self._ledger.join(peer_name(peer), hello.incarnation)
        self._fleet.join(peer, hello)
        log.info("server joined", server=peer_name(peer), tasks=hello.train_tasks, tickets_reissued=lost)
        await self._send(peer, m.Welcome(version=await self._ledger.version()))

    async def goodbye(self, peer: bytes, goodbye: m.ServerGoodbye) -> None:
        """Removes a server that stops, unless a newer process has registered under its name."""
        await self._ingest.store()  # its earlier deliveries count
        server = self._fleet.servers.get(peer)
        known = server is not None and server.hello.incarnation == goodbye.incarnation
        if known:
            del self._fleet.servers[peer]  # before the call: no heartbeat may be recorded after it
        back = await self._ledger.leave(peer_name(peer), goodbye.incarnation, sampled=goodbye.sampled)
        if known:
            log.info("server left", server=peer_name(peer), tickets_reissued=back)
        self._fleet.offer_evaluation()

    async def _refusal(self, peer: bytes, hello: m.ServerHello) -> str | None:
        """The reason to refuse a server, or None. Raises: ConfigError (`require_unknown_incarnation`)."""
        if hello.run != self._ledger.run:
            return identity.wrong_run_error(self._ledger.run, "server", hello.run)
        if not hello.train_tasks:
            return f"env {hello.env!r} has no tasks to train on"
        difference = identity.settings_difference(hello.settings, self._settings)
        if difference:
            if peer not in self._fleet.servers:
                identity.require_unknown_incarnation(
                    hello.incarnation, await self._ledger.incarnation(peer_name(peer)), difference
                )
            return difference
        others = chain(self._fleet.learner_settings(), self._fleet.server_settings(but=peer))
        difference = identity.host_difference(hello.settings, self._settings, others)
        if difference:
            return difference
        mine = identity.server_identity(hello)
        return identity.identity_change(mine, await self._ledger.identify(mine))

    async def failed(self, peer: bytes, message: m.GroupFailed) -> None:
        """Records a failed ticket."""
        log.warning("group failed", group=message.id, reason=message.reason, detail=message.detail)
        origin = origin_of(message.id, peer_name(peer), message.sampled)
        if message.kind == m.EVAL:
            outcome = await self._ledger.evaluations.record_failure(
                message.id, reason=message.reason, origin=origin, lost=message.unused
            )
            self._fleet.offer_evaluation()
        elif message.reissue:
            outcome = await self._ledger.give_back(message.id, origin=origin, lost=message.unused)
        else:
            lengths = histogram(message.lengths)
            dropped = {message.reason: lengths} if lengths else {}
            facts = Facts(tokens=message.tokens, delivered=lengths, dropped=dropped, lost=message.unused)
            outcome = await self._ledger.filter(message.id, reason=message.reason, facts=facts, origin=origin)
        await self._send(peer, m.Acknowledge(outcomes={message.id: outcome}))
        self._fleet.ticket_returned(peer)
