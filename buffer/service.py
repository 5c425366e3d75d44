"""The buffer service: issues tickets, stores what comes back, leases it. It holds nothing that Redis doesn't: whom it
talks to it learns anew, and whatever it was asked in vain is asked again."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import redis.exceptions
import zmq
import zmq.asyncio

from slipstream.buffer import identity
from slipstream.buffer.cancel import cancel
from slipstream.buffer.intake import Intake
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.outage import Outage
from slipstream.buffer.reception import Arrival, Reception
from slipstream.buffer.store import EVAL_SLICE, Facts
from slipstream.buffer.tasks import task_order
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import FrameError, encode
from slipstream.configs import RunConfig
from slipstream.configs.logs import get_log

log = get_log("buffer.service")

SWEEP_S = 1.0
RETRY_S = 0.2
GRACE_S = 5.0
"""A ticket may be on its way to its server for so long; then it counts as lost."""
MESSAGES_PER_GRANT = 1000
MOST_SERVERS = 10_000
MOST_WAITING = 100
"""Learners that may wait for a lease at once; there is one, and whoever invents more must not fill the memory."""
SAY_EVERY_S = 1.0
SAY_FULL_EVERY_S = 5.0


@dataclass
class Server:
    """A rollout server as the service sees it."""

    hello: m.ServerHello
    credits: m.Credits | None = None
    heard_at: float = 0.0
    drained: int | None = None
    """The last version of which it was told that its evaluation needs nothing more from it."""


@dataclass(frozen=True)
class PendingLease:
    """A lease request that waits for groups."""

    peer: bytes
    request: m.LeaseRequest
    until: float


@dataclass
class BufferService:
    """One run's buffer service, over a bound ROUTER socket."""

    config: RunConfig
    ledger: Ledger
    socket: zmq.asyncio.Socket
    servers: dict[bytes, Server] = field(default_factory=dict)
    waiting: list[PendingLease] = field(default_factory=list)
    evaluating: int | None = None
    dropped_frames: int = 0
    length_bias: dict[str, float] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    reception: Reception = field(init=False)
    intake: Intake = field(init=False)
    _sweep_at: float = 0.0
    _judges_from: float = 0.0
    """Nobody is judged silent before: servers that did not hear of this service's (re)start may speak first."""
    _said_at: float = -SAY_EVERY_S
    _said_full_at: float = -SAY_FULL_EVERY_S

    def __post_init__(self) -> None:
        self.reception = Reception(self.config, self.socket)
        self.intake = Intake(self.ledger, self._send, self._group_malformed)

    async def run(self) -> None:
        """Serves until cancelled.

        Raises: ConfigError when the run was begun with other settings, DeadlineError when Redis is of no use for
        `redis.outage_deadline_s`.
        """
        receiving, serving = asyncio.create_task(self.reception.run()), asyncio.create_task(self._serve())
        try:
            await asyncio.wait([receiving, serving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            try:
                await cancel(receiving)
            finally:
                await cancel(serving)

    async def _serve(self) -> None:
        outage = Outage(self.config.redis.outage_deadline_s)
        opened = False
        while True:
            try:
                if not opened:
                    identity.require_same(self.config, await self.ledger.identify(identity.of_config(self.config)))
                    opened = True
                await self._turn()
                outage.over()
            except redis.exceptions.RedisError as error:
                outage.note(error)
                self._judges_from = _now() + self.config.buffer.server_deadline_s
                await asyncio.sleep(RETRY_S)

    async def _turn(self) -> None:
        """Works through what has arrived, then grants: groups come in bursts, and one grant serves them all."""
        if _now() - self._sweep_at > 2 * SWEEP_S:  # just started, or it stood still: so did what it heard of others
            self._judges_from = _now() + self.config.buffer.server_deadline_s
            self._sweep_at = _now()
        timeout_s = self._sweep_at - _now()
        # Bounded: a peer that never stops sending must not keep the others from being granted anything.
        for _ in range(MESSAGES_PER_GRANT):
            arrival = await self.reception.next(timeout_s)
            if arrival is None:
                break
            await self._dispatch(arrival)
            timeout_s = 0
        await self._settle()
        if _now() >= self._sweep_at:
            self._sweep_at = _now() + SWEEP_S
            await self._sweep()
        await self._grant()

    async def _sweep(self) -> None:
        judges = _now() >= self._judges_from
        swept = await self.ledger.sweep(silent_s=self.config.buffer.server_deadline_s if judges else None)
        if swept.tickets or swept.leases or swept.slices:
            log.warning(
                "deadlines passed",
                tickets_reissued=swept.tickets,
                groups_back_to_ready=swept.leases,
                eval_slices_back=swept.slices,
                silent_servers=swept.silent,
            )
        self.servers = {peer: server for peer, server in self.servers.items() if _name(peer) not in swept.silent}
        if swept.slices:
            self._ask_all_again()
        self.evaluating = await self.ledger.evaluating()
        counts = await self.ledger.counts()
        self.length_bias = await self.ledger.length_bias(sorted(counts.answers_dropped))
        self.outcomes = await self.ledger.outcomes()

    # --- messages ---------------------------------------------------------------------------------------------------

    def _dropped(self, event: str, **fields: str) -> None:
        """Counts what was malformed; says so now and then, because anybody can send a lot of it."""
        self.dropped_frames += 1
        if _now() - self._said_at >= SAY_EVERY_S:
            self._said_at = _now()
            log.warning(event, dropped=self.dropped_frames, **fields)

    async def _settle(self) -> None:
        await self._if_there_is_room(self.intake.settle())

    def _group_malformed(self, group_id: str, error: FrameError) -> None:
        self._dropped("group malformed", group=group_id, reason=str(error))

    async def _dispatch(self, arrival: Arrival) -> None:
        peer, message = arrival.peer, arrival.message
        if not isinstance(message, m.Deliver | m.Credits | FrameError):
            await self._settle()  # what came before it must count for it
        match message:
            case FrameError():
                self._dropped("frame dropped", peer=peer.hex(), reason=str(message))
            case m.ServerHello():
                await self._if_there_is_room(self._welcome(peer, message))
            case m.Credits() | m.Deliver() | m.GroupFailed() if peer not in self.servers:
                await self._send(peer, m.WhoAreYou())
            case m.Credits():
                await self._heard(peer, self.servers[peer], message)
            case m.Deliver():
                await self._if_there_is_room(self.intake.take(peer, arrival.groups))
            case m.GroupFailed():
                log.warning("group failed", group=message.id, reason=message.reason, detail=message.detail)
                await self._send(peer, m.Acknowledge(outcomes={message.id: await self._failed(message)}))
            case m.LeaseRequest():
                self.waiting = [pending for pending in self.waiting if pending.peer != peer][1 - MOST_WAITING :]
                self.waiting.append(PendingLease(peer, message, _now() + message.wait_s))
            case _:
                await self._learner(peer, message)

    async def _welcome(self, peer: bytes, hello: m.ServerHello) -> None:
        refusal = await self._refusal(hello)
        if peer not in self.servers and len(self.servers) >= MOST_SERVERS:
            refusal = f"this buffer knows {MOST_SERVERS} servers already; it forgets those that fall silent"
        if refusal:
            log.warning("server refused", peer=_name(peer), reason=refusal)
            await self._send(peer, m.Refused(reason=refusal))
            return
        lost = await self.ledger.join(_name(peer), hello.incarnation)
        self.servers[peer] = Server(hello, heard_at=_now())
        log.info("server joined", server=_name(peer), tasks=hello.train_tasks, tickets_reissued=lost)
        if self.evaluating is not None:
            await self.ledger.publish(self.evaluating, eval_tasks=self._eval_tasks())
        await self._send(peer, m.Welcome(version=await self.ledger.version()))

    async def _refusal(self, hello: m.ServerHello) -> str | None:
        """What about a server doesn't fit the run, None if it all does."""
        if hello.run != self.config.run.name:
            return f"this buffer serves run {self.config.run.name!r}, the server is of run {hello.run!r}"
        if not hello.train_tasks:
            return f"env {hello.env!r} has no tasks to train on"
        mine = identity.of_server(hello)
        return identity.difference(mine, await self.ledger.identify(mine))

    async def _heard(self, peer: bytes, server: Server, credits: m.Credits) -> None:
        server.credits, server.heard_at = credits, _now()
        lost = await self.ledger.hear(_name(peer), held=credits.held, grace_s=GRACE_S)
        if lost:
            log.warning("tickets lost on their way", server=_name(peer), reissued=lost)
            self._ask_all_again()

    async def _failed(self, message: m.GroupFailed) -> str:
        """A ticket came to nothing; the answers that it had are of unknown length."""
        if message.id.startswith("e"):
            self._ask_all_again()
            return await self.ledger.evaluation_failed(message.id)
        return await self.ledger.filter(message.id, reason=message.reason, facts=Facts(tokens=message.tokens))

    async def _learner(self, peer: bytes, message: Any) -> None:
        match message:
            case m.LearnerHello() if message.run != self.config.run.name:
                reason = f"this buffer serves run {self.config.run.name!r}, the learner is of run {message.run!r}"
                await self._send(peer, m.Refused(request=message.request, reason=reason))
                return
            case m.LearnerHello():
                await self._learner_joined(peer, message)
            case m.Trained():
                await self.ledger.train(message.step)
            case m.Published():
                await self._publish(message)
            case m.Throttle():
                await self.ledger.throttle(message.max_staleness)
                log.info("throttle set", max_staleness=min(message.max_staleness, self.config.buffer.max_staleness))
            case m.Checkpointed():
                await self.ledger.durable(message.step)
            case m.Finish():
                expired = await self.ledger.finish()
                log.info("run finished", groups_expired=expired)
        await self._send(peer, await self._state(message.request))

    async def _learner_joined(self, peer: bytes, message: m.LearnerHello) -> None:
        self.waiting.clear()  # of the learner that was here before: its lease would be held by nobody
        back, forgotten = await self.ledger.restart(message.step, learner=f"{_name(peer)}:{message.request}")
        log.info("learner joined", step=message.step, groups_back_to_ready=back)
        if forgotten:
            log.error("groups of undone steps were forgotten and can't be trained on again", steps=forgotten)

    async def _publish(self, message: m.Published) -> None:
        if message.evaluate:
            self.evaluating = message.version
        await self.ledger.publish(message.version, eval_tasks=self._eval_tasks() if message.evaluate else 0)

    def _eval_tasks(self) -> int:
        """Held-out tasks to evaluate on: no more than the env has, which a server knows; 0 as long as none is here."""
        known = [server.hello.eval_tasks for server in self.servers.values()]
        return min([self.config.eval.tasks, *known]) if known else 0

    async def _state(self, request: int) -> m.State:
        standing = await self.ledger.standing()
        return m.State(
            request=request,
            version=standing.version,
            counts=msgspec.structs.replace(standing.counts, dropped_frames=self.dropped_frames),
            servers=[server.credits.status for server in self.servers.values() if server.credits],
            evals=await self.ledger.eval_reports(standing.evaluated),
            length_bias=self.length_bias,
            tasks=self.outcomes,
        )

    # --- grants -----------------------------------------------------------------------------------------------------

    async def _grant(self) -> None:
        """Leases what waiting learners can have, and issues what servers may generate."""
        await self._grant_leases()
        now = _now()
        for peer, server in list(self.servers.items()):
            if now - server.heard_at > self.config.buffer.server_deadline_s:
                del self.servers[peer]
                log.warning("server silent, forgotten", server=_name(peer))
            elif server.credits is not None:
                await self._if_there_is_room(self._grant_evaluation(peer, server, server.credits))
                await self._if_there_is_room(self._grant_tickets(peer, server.hello, server.credits))

    async def _grant_leases(self) -> None:
        still_waiting = []
        for pending in self.waiting:
            request = pending.request
            lease = await self.ledger.lease(
                request.step, consuming_version=request.consuming_version, count=request.count
            )
            if lease is not None:
                await self._send(
                    pending.peer,
                    m.Lease(request=request.request, step=request.step, group_ids=lease.ids, weights=lease.weights),
                )
            elif _now() >= pending.until:
                await self._send(pending.peer, m.NotReady(request=request.request))
            else:
                still_waiting.append(pending)
        self.waiting = still_waiting

    async def _grant_tickets(self, peer: bytes, hello: m.ServerHello, credits: m.Credits) -> None:
        issued = await self.ledger.issue(
            _name(peer),
            server_version=credits.status.version,
            credits=credits.capacity,
            train_tasks=hello.train_tasks,
        )
        tickets = [
            m.Ticket(
                id=task.id,
                kind=m.TRAIN,
                epoch=task.epoch,
                indices=[
                    int(task_order(hello.train_tasks, seed=self.config.run.seed, epoch=task.epoch)[task.position])
                ],
                samples=self.config.rollout.group_size,
                version=credits.status.version,
                greedy=self.config.greedy_baseline,
            )
            for task in issued
        ]
        if tickets:
            await self._send(peer, m.Tickets(tickets=tickets))

    async def _grant_evaluation(self, peer: bytes, server: Server, credits: m.Credits) -> None:
        """Gives a server that runs the version under evaluation its share of the held-out tasks."""
        version = credits.status.version
        if version != self.evaluating or version == server.drained:
            return
        share = -(-self.config.eval.tasks // len(self.servers))
        slices = -(-share // EVAL_SLICE)
        left, granted = await self.ledger.evaluate(version, server=_name(peer), slices=slices)
        tickets = [
            m.Ticket(
                id=work.id,
                kind=m.EVAL,
                epoch=0,
                indices=list(range(work.first, work.first + work.tasks)),
                samples=1,
                version=version,
            )
            for work in granted
        ]
        if tickets:
            await self._send(peer, m.Tickets(tickets=tickets))
        if not left:
            server.drained = version
            await self._send(peer, m.EvalDrained(version=version))

    def _ask_all_again(self) -> None:
        """Slices of the evaluation came back: servers that were told there are none may have them."""
        for server in self.servers.values():
            server.drained = None

    async def _if_there_is_room(self, work: Awaitable[None]) -> None:
        """What needs memory is asked for again later if Redis has none left; all else goes on, as it frees some."""
        try:
            await work
        except redis.exceptions.OutOfMemoryError as error:
            if _now() - self._said_full_at >= SAY_FULL_EVERY_S:
                self._said_full_at = _now()
                log.warning("Redis is full: groups and tickets wait until the learner has made room", error=str(error))

    async def _send(self, peer: bytes, message: m.Message) -> None:
        try:
            # Not waiting: a peer that doesn't read what it is sent must not hold up the others.
            await self.socket.send_multipart([peer, encode(message)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.servers.pop(peer, None)
            log.warning("peer is gone or doesn't read", peer=_name(peer), message=type(message).__name__)


def _name(peer: bytes) -> str:
    """A peer's identity as text; any bytes may be one."""
    return peer.decode(errors="backslashreplace")


def _now() -> float:
    return asyncio.get_running_loop().time()
