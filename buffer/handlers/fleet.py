"""Live rollout servers, and the granting of tickets to them."""

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from slipstream.buffer.handlers.peers import Send, peer_name
from slipstream.buffer.policies.admission import Candidate, Throughput, share_room, ticket_limit, uses_per_group
from slipstream.buffer.policies.curriculum import Place, skipped, upcoming
from slipstream.buffer.policies.sampling import task_order
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import MemoryGuard
from slipstream.buffer.store.types import IssuedTask, Room, TicketRequest
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.runtime.logging import get_log

log = get_log("buffer.fleet")

GRACE_S = 5.0
"""A ticket that its server does not list in a heartbeat after this time was lost on the way."""
RESERVED_S = 1.0
"""Time for which tickets are kept for servers that have just joined, or are behind and have a version published or
installed since."""


@dataclass
class Server:
    """State of a rollout server."""

    hello: m.ServerHello
    throughput: Throughput
    joined_at: float = 0.0
    credits: m.Credits | None = None
    version_since: float = 0.0
    """When it first reported its present version."""
    last_message_at: float = 0.0
    credits_used: bool = False
    """True if all its credits were granted and no ticket has returned since."""
    grant: int = 0
    """Number of its last grant of tickets, over all servers."""
    recorded: m.Credits | None = None
    """Its last heartbeat in the ledger."""
    eval_share_granted: int | None = None
    """The version of whose evaluation it got its share, if no ticket has returned since."""
    eval_drained: int | None = None
    """The last version whose EvalDrained it was sent."""

    least_clock_offset_s: float = math.inf
    """Least difference of this clock to the server's, of all its heartbeats."""
    delay_s: float = 0.0
    """Time that its last heartbeat waited for the service, as far as it exceeds that of the fastest one."""

    def report(self, credits: m.Credits, *, now: float) -> None:
        """Records a heartbeat."""
        if credits.status.up_s:
            offset_s = now - credits.status.up_s
            self.least_clock_offset_s = min(offset_s, self.least_clock_offset_s)
            self.delay_s = offset_s - self.least_clock_offset_s
        if self.credits is None or self.credits.status.version != credits.status.version:
            self.version_since = now
        self.credits = credits

    def offer_evaluation(self) -> None:
        """Has evaluation tickets granted again, and an EvalDrained, which may be lost, repeated."""
        self.eval_share_granted = self.eval_drained = None


@dataclass(frozen=True)
class Asking:
    """A server with unused credits."""

    peer: bytes
    server: Server
    credits: m.Credits

    @property
    def name(self) -> str:
        """Its name in the ledger."""
        return peer_name(self.peer)

    @property
    def version(self) -> int:
        """Its policy version."""
        return self.credits.status.version


class Fleet:
    """The live rollout servers.

    Attributes:
        servers: by peer identity; one that is silent for `buffer.server_deadline_s` is removed.
        evaluating: the version whose evaluation was requested last.
        learner: hello of the run's learner; None before it, and after the run's end.
        may_resume: True if tickets of lost servers may wait.
        paused: True while no train tickets are issued, because the learner is away.
    """

    def __init__(self, config: RunConfig, ledger: Ledger, send: Send, memory: MemoryGuard) -> None:
        self._config = config
        self._ledger = ledger
        self._send = send
        self._memory = memory
        uses = uses_per_group(config.buffer, publish_every_steps=config.weights.publish_every_steps)
        self._capacity = (config.buffer.max_staleness + 1) * config.groups_per_version / uses
        self._delivered = self._grants = 0
        self._latest, self._published_at = -1, float("-inf")
        self.servers: dict[bytes, Server] = {}
        self.evaluating: int | None = None
        self.learner: m.LearnerHello | None = None
        self.paused = False
        self.may_resume = True

    def join(self, peer: bytes, hello: m.ServerHello) -> None:
        """Registers a server."""
        now = _now()
        self.servers[peer] = Server(hello, Throughput(self._delivered), joined_at=now, last_message_at=now)

    def server_settings(self, *, but: bytes = b"") -> Iterator[tuple[str, Mapping[str, str]]]:
        """Name and settings of each server, except for the peer `but`."""
        for peer, server in self.servers.items():
            if peer != but:
                yield f"rollout server {peer_name(peer)}", server.hello.settings

    def learner_settings(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Name and settings of the learner, if there is one."""
        if self.learner is not None:
            yield "the learner", self.learner.settings

    def ticket_returned(self, peer: bytes, *, delivered: int = 0) -> None:
        """Records that tickets of this server have returned, so that it may get other ones.

        Args:
            delivered: number of groups, for the server's throughput.
        """
        self._delivered += delivered
        if peer in self.servers:
            server = self.servers[peer]
            server.throughput.add(delivered, delivered_by_fleet=self._delivered, servers=len(self.servers))
            server.credits_used = False
            server.eval_share_granted = None

    def recheck_credits(self) -> None:
        """Rechecks all servers: tickets may have returned without a message, such as by their deadline."""
        self.may_resume = True
        for server in self.servers.values():
            server.credits_used = False

    def offer_evaluation(self) -> None:
        """Offers returned slices of the evaluation to all servers, also after their EvalDrained."""
        for server in self.servers.values():
            server.offer_evaluation()

    def forget(self, names: set[str]) -> None:
        """Removes the named servers and all others that are silent."""
        now = _now()
        for peer, server in list(self.servers.items()):
            if peer_name(peer) in names or self._is_silent(server, now):
                del self.servers[peer]
                log.warning("server silent, removed", server=peer_name(peer))

    def silences_s(self, now: float) -> dict[str, float]:
        """Seconds since each server's last message."""
        return {peer_name(peer): now - server.last_message_at for peer, server in self.servers.items()}

    async def grant(self) -> None:
        """Records the latest heartbeats, and issues tickets to servers with unused credits."""
        await self._record_heartbeats()
        now = _now()
        for peer, server in list(self.servers.items()):
            if server.credits is None or self._is_silent(server, now) or not self._awaits_evaluation(server):
                continue
            if self.servers.get(peer) is server:  # otherwise removed or replaced during the call for another server
                await self._memory.attempt(self._grant_evaluation(peer, server, server.credits))
        if self.may_resume:
            self.may_resume = False
            await self._memory.attempt(self._grant_resumed(now))
        if not self.paused:
            await self._memory.attempt(self._grant_groups(now))

    async def _record_heartbeats(self) -> None:
        """All at once: a script call for each of hundreds of servers would take most of the service's time."""
        reports = {
            peer: (server, server.credits)
            for peer, server in self.servers.items()
            if server.credits is not None and server.credits is not server.recorded
        }
        if not reports:
            return
        held = {peer_name(peer): credits.held for peer, (_, credits) in reports.items()}
        # An overloaded service reads heartbeats late: tickets that were granted in the meantime are not in them.
        delay_s = max(server.delay_s for server, _ in reports.values())
        sampled = {peer_name(peer): credits.sampled for peer, (_, credits) in reports.items()}
        lost = await self._ledger.heartbeat(held, sampled=sampled, grace_s=GRACE_S + delay_s)
        for server, credits in reports.values():
            server.recorded = credits
            server.credits_used = False
        if lost:
            log.warning("tickets lost on the way", reissued=lost)
            self.offer_evaluation()

    def _awaits_evaluation(self, server: Server) -> bool:
        """True if a server with credits may get evaluation tickets, or an EvalDrained."""
        assert server.credits is not None
        version = server.credits.status.version
        if self.evaluating is None or version > self.evaluating:
            return False
        return version not in (server.eval_share_granted, server.eval_drained)

    def _is_silent(self, server: Server, now: float) -> bool:
        return now - server.last_message_at > self._config.buffer.server_deadline_s

    async def _grant_groups(self, now: float) -> None:
        """Grants train tickets."""
        asking = [
            Asking(peer, server, server.credits)
            for peer, server in self.servers.items()
            if server.credits is not None and not server.credits_used and not self._is_silent(server, now)
        ]
        if not asking:
            return
        for asker in asking:
            asker.server.credits_used = True  # before the calls: a ticket that returns during them must count
        full: set[bytes] = set()
        try:
            room = await self._ledger.room(
                [asker.name for asker in asking], sorted({asker.version for asker in asking})
            )
            if room.version != self._latest:
                self._latest, self._published_at = room.version, now
            if room.held:
                issued = await self._issue(asking, room, now)
                full = {
                    asker.peer
                    for asker in asking
                    if room.held[asker.name] + issued[asker.peer] >= asker.credits.capacity
                }
        finally:
            for asker in asking:
                asker.server.credits_used = asker.server.credits_used and asker.peer in full

    async def _issue(self, asking: Sequence[Asking], room: Room, now: float) -> Counter[bytes]:
        """Issues and sends tickets; returns their number by peer."""
        # Others left during the call. Of equal servers, those come first that got none for longest.
        asking = [asker for asker in asking if self.servers.get(asker.peer) is asker.server]
        asking.sort(key=lambda asker: asker.server.grant)
        shares = share_room([*self._candidates(asking, room, now), *self._newcomers(room, now)])
        granted = [
            (asker, TicketRequest(asker.name, asker.version, asker.credits.capacity, share))
            for asker, share in zip(asking, shares, strict=False)
            if share and room.allowed[asker.version]  # otherwise its share is reserved
        ]
        numbers = Counter[bytes]()
        if not granted:
            return numbers
        train_tasks = asking[0].server.hello.train_tasks
        requests = [request for _, request in granted]
        skip = await self._skipped(room, sum(request.tickets for request in requests), train_tasks)
        issued = await self._ledger.issue(requests, train_tasks=train_tasks, skip=skip)
        for (asker, _), tasks in zip(granted, issued, strict=True):
            self._grants += 1
            asker.server.grant = self._grants
            numbers[asker.peer] = len(tasks)
            if tasks:
                await self._send(asker.peer, m.Tickets(tickets=self._tickets(tasks, asker.version, train_tasks)))
        return numbers

    async def _grant_resumed(self, now: float) -> None:
        """Shares out the tickets of lost servers that go on with their episodes, whatever credits the servers have."""
        live = [
            Asking(peer, server, server.credits)
            for peer, server in self.servers.items()
            if server.credits is not None and server.credits.capacity and not self._is_silent(server, now)
        ]
        waiting = await self._ledger.resumable() if live else 0
        if not waiting:
            return
        share = math.ceil(waiting / len(live))
        requests = [TicketRequest(each.name, each.version, each.credits.capacity, share) for each in live]
        train_tasks = live[0].server.hello.train_tasks
        issued = await self._ledger.issue(requests, train_tasks=train_tasks, resumed=True)
        for asker, tasks in zip(live, issued, strict=True):
            for task in tasks:  # one by one: each may have megabytes of events
                (ticket,) = self._tickets([task], asker.version, train_tasks)
                events = await self._ledger.events(task.id)
                await self._send(asker.peer, m.Tickets(tickets=[msgspec.structs.replace(ticket, events=events)]))
                log.info("episodes resumed", ticket=task.id, server=asker.name, events=task.events)

    async def _skipped(self, room: Room, tickets: int, train_tasks: int) -> Sequence[Place]:
        """Places at the cursor that a grant of so many tickets skips."""
        curriculum, seed = self._config.buffer.curriculum, self._config.run.seed
        if curriculum is None:
            return ()
        places = upcoming(room.cursor, tickets=tickets, train_tasks=train_tasks, curriculum=curriculum)
        streaks = await self._ledger.streaks([self.task(*place, train_tasks=train_tasks) for place in places])
        return skipped(places, streaks, train_tasks=train_tasks, seed=seed, curriculum=curriculum)

    def task(self, epoch: int, position: int, *, train_tasks: int) -> int:
        """Index of the task at a position of an epoch."""
        return int(task_order(train_tasks, seed=self._config.run.seed, epoch=epoch)[position])

    def _candidates(self, asking: Sequence[Asking], room: Room, now: float) -> Iterator[Candidate]:
        most, reserves_since = max(room.allowed.values()), now - RESERVED_S
        total = sum(map(self._throughput, self.servers.values()))
        for asker in asking:
            limit = ticket_limit(
                throughput=self._throughput(asker.server), total_throughput=total, capacity=self._capacity
            )
            allowed = room.allowed[asker.version]
            installs = asker.version == room.version - 1 and self._published_at > reserves_since
            if not allowed and (installs or asker.server.version_since > reserves_since):
                allowed = most
            yield Candidate(room.held[asker.name], min(limit, asker.credits.capacity), allowed)

    def _newcomers(self, room: Room, now: float) -> Iterator[Candidate]:
        """Servers that have not reported their credits yet."""
        most = max(room.allowed.values())
        for server in self.servers.values():
            if server.credits is None and now - server.joined_at < RESERVED_S:
                yield Candidate(held=0, limit=most, room=most)

    def _throughput(self, server: Server) -> float:
        return server.throughput.value(delivered_by_fleet=self._delivered, servers=len(self.servers))

    def _tickets(self, tasks: Sequence[IssuedTask], version: int, train_tasks: int) -> list[m.Ticket]:
        return [
            m.Ticket(
                id=task.id,
                kind=m.TRAIN,
                epoch=task.epoch,
                indices=[self.task(task.epoch, task.position, train_tasks=train_tasks)],
                samples=self._config.rollout.group_size,
                version=version,
                greedy=self._config.greedy_baseline,
            )
            for task in tasks
        ]

    async def _grant_evaluation(self, peer: bytes, server: Server, credits: m.Credits) -> None:
        """Grants a server that runs the version under evaluation its share of the held-out tasks."""
        version = credits.status.version
        if version != self.evaluating:  # a later one is; the server may be waiting for its share
            server.eval_drained = version
            await self._send(peer, m.EvalDrained(version=version))
            return
        share = self._eval_share(peer, server, credits)
        if not share:
            return
        left = None
        # Before the call, as above: slices may return during it.
        server.eval_share_granted = server.eval_drained = version
        try:
            left, granted = await self._ledger.evaluations.grant(
                version, server=peer_name(peer), eval_tasks=server.hello.eval_tasks, share=share
            )
        finally:
            if left is None:
                server.eval_share_granted = None
            if left != 0:
                server.eval_drained = None
        tickets = [
            m.Ticket(
                id=work.id,
                kind=m.EVAL,
                epoch=0,
                indices=list(range(work.first, work.first + work.tasks)),
                samples=self._config.eval.samples,
                version=version,
            )
            for work in granted
        ]
        if tickets:
            await self._send(peer, m.Tickets(tickets=tickets))
        if not left:
            await self._send(peer, m.EvalDrained(version=version))

    def _eval_share(self, peer: bytes, server: Server, credits: m.Credits) -> int:
        """Held-out tasks that a server may hold: its part of all by its credits, at most what it can play at once.

        The parts add up to the tasks; 0 without credits, as while its engine restarts. Servers of a later version do
        not count, because they can't answer.
        """
        version, now = credits.status.version, _now()
        before = total = 0
        for other_peer, other in self.servers.items():
            if other_peer == peer:
                before, total = total, total + credits.capacity
            elif other.credits is not None and other.credits.status.version <= version:
                total += 0 if self._is_silent(other, now) else other.credits.capacity
        if not credits.capacity:
            return 0
        tasks = min(server.hello.eval_tasks, self._config.eval.tasks)
        part = tasks * (before + credits.capacity) // total - tasks * before // total
        return min(credits.capacity * self._config.rollout.group_size, max(1, part))


def _now() -> float:
    return asyncio.get_running_loop().time()
