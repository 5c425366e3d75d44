"""The buffer service: issues tickets, stores what comes back, leases it. It holds nothing that Redis doesn't: whom it
talks to it learns anew, and whatever it was asked in vain is asked again."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import zmq.asyncio

from slipstream.buffer import identity
from slipstream.buffer.cancel import cancel
from slipstream.buffer.intake import Intake
from slipstream.buffer.leasing import Leasing
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.outage import TROUBLE, Fullness, Outage
from slipstream.buffer.reception import MOST_WAITING, Arrival, Reception
from slipstream.buffer.records import Facts, SupersededError, UnknownLearnerError
from slipstream.buffer.sending import peer_name, sender
from slipstream.buffer.ticketing import Server, Ticketing
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import FrameError
from slipstream.configs import RunConfig
from slipstream.configs.errors import RefusedError
from slipstream.configs.logs import NowAndThen, get_log

log = get_log("buffer.service")

SWEEP_S = 1.0
RETRY_S = 0.2
GRACE_S = 5.0
"""A ticket may be on its way to its server for so long; then it counts as lost."""
MOST_SERVERS = 10_000
SAY_EVERY_S = 1.0


class BufferService:
    """One run's buffer service, over a bound ROUTER socket.

    Several things go on beside each other, so that a learner's lease does not wait for groups that are being stored:
    messages of servers are taken in one after the other, learners are answered, groups are stored, leases and tickets
    are granted, and deadlines are looked at. Each change of the ledger is atomic in Redis.

    Attributes:
        config: of the run.
        ledger: what the service holds nothing beside.
        socket: the bound ROUTER, its caller's to close.
        ticketing: the servers it knows, and what they are granted.
        dropped_frames: how much arrived that was no message, or a group that was none.
    """

    def __init__(self, config: RunConfig, ledger: Ledger, socket: zmq.asyncio.Socket, outage: Outage) -> None:
        """`outage`: what the ledger's connection is told of, too."""
        self.config = config
        self.ledger = ledger
        self.socket = socket
        self._send = sender(socket, self._gone)
        self._fullness = Fullness()
        self._outage = outage
        self._reception = Reception(config, socket)
        self._leasing = Leasing(ledger, self._send)
        self.ticketing = Ticketing(config, ledger, self._send, self._fullness)
        self._intake = Intake(ledger, self._send, self._group_malformed, self.ticketing.landed)
        self._asked: asyncio.Queue[Arrival] = asyncio.Queue(MOST_WAITING)
        self._delivered, self._may_lease, self._may_issue = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._greeted = ""
        self._refused: m.ServerHello | None = None
        self.dropped_frames = 0
        self._length_bias: dict[str, float] = {}
        # Nobody is judged silent before: servers that did not hear of this service's (re)start may speak first.
        self._judges_from = 0.0
        self._swept_at = float("-inf")
        self._dropped_news = NowAndThen(SAY_EVERY_S)

    async def run(self) -> None:
        """Serves until cancelled.

        Raises: ConfigError when the run was begun or goes on with other settings, or Redis may evict keys;
        DeadlineError when Redis is of no use for `redis.outage_deadline_s`.
        """
        while not await self._through_outages(self._open()):
            pass
        lanes = [
            asyncio.create_task(lane)
            for lane in (
                self._reception.run(),
                self._keep_sweeping(),
                self._keep_listening(),
                self._keep_answering(),
                self._whenever(self._delivered, self._store),
                self._keep_leasing(),
                self._whenever(self._may_issue, self.ticketing.grant),
            )
        ]
        try:
            await asyncio.wait(lanes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(*lanes)

    async def _open(self) -> None:
        await self.ledger.require_durable()
        identity.require_same(self.config, await self.ledger.identify(identity.of_config(self.config)))

    async def _stay_open(self) -> None:
        """Who flushes Redis, or starts it without its file, doesn't end the run: learner and servers are at hand."""
        if identity.of_config(self.config).keys() <= (await self.ledger.identity()).keys():
            return
        await self._open()
        self.ticketing.servers.clear()  # they say hello again, and with it what the tasks are
        log.error(
            "Redis has lost the run's ledger: it was flushed, came back without its file, or evicted keys; the run "
            "goes on with an empty one, which does not know the steps before",
            redis=self.config.redis.address,
        )

    async def _through_outages(self, work: Awaitable[None]) -> bool:
        """Whether the work was done. Raises: DeadlineError when Redis is of no use for too long."""
        try:
            await work
        except TROUBLE as error:
            self._outage.note(error)
            self._judges_from = _now() + self.config.buffer.server_deadline_s
            await asyncio.sleep(RETRY_S)
            return False
        return True

    # --- what goes on beside each other -----------------------------------------------------------------------------

    async def _keep_listening(self) -> None:
        while True:
            await self._through_outages(self._dispatch(await self._reception.next()))

    async def _keep_answering(self) -> None:
        while True:
            asked = await self._asked.get()
            await self._through_outages(self._learner(asked.peer, asked.message))
            self._wake()

    async def _keep_sweeping(self) -> None:
        while True:
            swept = await self._through_outages(self._sweep())
            self._swept_at = _now()
            if swept:
                self._outage.over()
                self._wake()
                await asyncio.sleep(SWEEP_S)

    async def _keep_leasing(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._leasing.until):
                    await self._may_lease.wait()
            self._may_lease.clear()
            await self._through_outages(self._lease())

    async def _whenever(self, woken: asyncio.Event, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await woken.wait()
            woken.clear()
            await self._through_outages(work())

    def _wake(self) -> None:
        """Something has changed: more may be leased, or issued."""
        if self._leasing:
            self._may_lease.set()
        self._may_issue.set()

    async def _store(self) -> None:
        await self._settle()
        self._wake()

    async def _settle(self) -> None:
        await self._fullness.attempt(self._intake.settle())

    async def _lease(self) -> None:
        await self._leasing.grant()
        self._may_issue.set()

    async def _sweep(self) -> None:
        await self._stay_open()
        now, deadline_s = _now(), self.config.buffer.server_deadline_s
        if now - self._swept_at > 2 * SWEEP_S:  # just started, or it stood still, or Redis did: so did what was heard
            self._judges_from = now + deadline_s
        judging = now >= self._judges_from
        swept = await self.ledger.sweep(silent_s=deadline_s if judging else None, heard=self.ticketing.silences_s(now))
        if swept.tickets or swept.leases or swept.slices or swept.silent:
            log.warning(
                "deadlines passed",
                tickets_reissued=swept.tickets,
                groups_back_to_ready=swept.leases,
                eval_slices_back=swept.slices,
                silent_servers=swept.silent,
            )
        if judging:
            self.ticketing.forget(set(swept.silent))
        self.ticketing.look_at_all()
        standing = await self.ledger.standing()
        self.ticketing.evaluating = standing.evaluating
        if standing.slices_left:  # they may have come back to another service
            self.ticketing.ask_all_again()
        self._length_bias = await self.ledger.length_bias(sorted(standing.counts.answers_dropped))

    # --- messages ---------------------------------------------------------------------------------------------------

    async def _dispatch(self, arrival: Arrival) -> None:
        peer, message = arrival.peer, arrival.message
        server = self.ticketing.servers.get(peer)
        if server is not None:
            server.heard_at = _now()
        match message:
            case FrameError():
                self._dropped("frame dropped", peer=peer.hex(), reason=str(message))
                return
            case m.ServerGoodbye():
                await self._part(peer, message)
            case m.Credits() | m.Deliver() | m.GroupFailed() if server is None:
                await self._send(peer, m.WhoAreYou())
                return
            case m.Deliver():
                await self._fullness.attempt(self._intake.take(peer, arrival.groups))
                self._delivered.set()
                return
            case m.ServerHello():
                await self._fullness.attempt(self._welcome(peer, message))
            case m.Credits():
                await self._heard(peer, message)
            case m.GroupFailed():
                await self._failed(peer, message)
            case m.LeaseRequest():
                self._leasing.ask(peer, message)
            case _:
                await self._asked.put(arrival)
                return
        self._wake()

    async def _welcome(self, peer: bytes, hello: m.ServerHello) -> None:
        await self._settle()  # what came before it is dealt with, which the answer says
        servers = self.ticketing.servers
        known = servers.get(peer)
        if known is not None and known.hello == hello:  # thousands of these may have come while Redis was away
            await self._send(peer, m.Welcome(version=await self.ledger.version()))
            known.ask_again()
            return
        refusal = await self._refusal(peer, hello)
        if peer not in servers and len(servers) >= MOST_SERVERS:
            refusal = f"this buffer knows {MOST_SERVERS} servers already; it forgets those that fall silent"
        if refusal:
            if self._refused != hello:  # many of one server may have waited for this service
                log.warning("server refused", peer=peer_name(peer), reason=refusal)
            self._refused = hello
            await self._send(peer, m.Refused(reason=refusal))
            return
        lost = await self.ledger.join(peer_name(peer), hello.incarnation)
        servers[peer] = Server(hello, heard_at=_now())
        log.info("server joined", server=peer_name(peer), tasks=hello.train_tasks, tickets_reissued=lost)
        await self._send(peer, m.Welcome(version=await self.ledger.version()))

    async def _part(self, peer: bytes, goodbye: m.ServerGoodbye) -> None:
        await self._settle()  # what it delivered before counts
        back = await self.ledger.leave(peer_name(peer), goodbye.incarnation)
        server = self.ticketing.servers.get(peer)
        if server is not None and server.hello.incarnation == goodbye.incarnation:
            self._gone(peer)
            log.info("server left", server=peer_name(peer), tickets_reissued=back)
        self.ticketing.ask_all_again()

    async def _refusal(self, peer: bytes, hello: m.ServerHello) -> str | None:
        """What about a server doesn't fit the run, None if it all does. Raises: ConfigError (`require_newcomer`)."""
        if hello.run != self.config.run.name:
            return identity.of_another_run(self.config, "server", hello.run)
        if not hello.train_tasks:
            return f"env {hello.env!r} has no tasks to train on"
        if hello.train_tasks < self.config.buffer.shards:
            return (
                f"env {hello.env!r} has {hello.train_tasks} tasks to train on, but each of the "
                f"buffer.shards={self.config.buffer.shards} needs one"
            )
        disagreement = identity.disagreement(hello, self.config)
        if disagreement:
            if peer not in self.ticketing.servers:
                identity.require_newcomer(
                    hello.incarnation, await self.ledger.incarnation(peer_name(peer)), disagreement
                )
            return disagreement
        mine = identity.of_server(hello)
        return identity.change(mine, await self.ledger.identify(mine))

    async def _heard(self, peer: bytes, credits: m.Credits) -> None:
        server = self.ticketing.servers[peer]
        server.credits = credits
        lost = await self.ledger.hear(peer_name(peer), held=credits.held, grace_s=GRACE_S)
        server.full = False
        if lost:
            log.warning("tickets lost on their way", server=peer_name(peer), reissued=lost)
            self.ticketing.ask_all_again()

    async def _failed(self, peer: bytes, message: m.GroupFailed) -> None:
        """A ticket came to nothing; the answers that it had are of unknown length."""
        log.warning("group failed", group=message.id, reason=message.reason, detail=message.detail)
        if message.id.startswith("e"):
            outcome = await self.ledger.evaluation_failed(message.id)
            self.ticketing.ask_all_again()
        else:
            facts = Facts(tokens=message.tokens)
            outcome = await self.ledger.filter(message.id, reason=message.reason, facts=facts)
        await self._send(peer, m.Acknowledge(outcomes={message.id: outcome}))
        self.ticketing.landed(peer)

    async def _learner(self, peer: bytes, message: Any) -> None:
        answer: m.Message
        try:
            await self._obey(message)
            answer = await self._state(message.request)
        except UnknownLearnerError:
            answer = m.WhoAreYou(request=message.request)
        except (RefusedError, SupersededError) as error:
            log.warning("learner refused", learner=peer_name(peer), reason=str(error))
            answer = m.Refused(request=message.request, reason=str(error))
        await self._send(peer, answer)

    async def _obey(self, message: Any) -> None:
        match message:
            case m.LearnerHello():
                await self._learner_joined(message)
            case m.Trained() | m.Published() | m.Throttle() | m.Checkpointed() | m.Finish() if (
                message.incarnation != self._greeted
            ):
                # This service was started since, perhaps with other settings: its hello says what the learner's are.
                raise UnknownLearnerError(self.config.run.name)
            case m.Trained():
                await self.ledger.train(message.step, learner=message.incarnation)
            case m.Published():
                await self._publish(message)
            case m.Throttle():
                await self.ledger.throttle(message.max_staleness, learner=message.incarnation)
            case m.Checkpointed():
                await self.ledger.durable(message.step, learner=message.incarnation)
            case m.StateRequest():
                await self._settle()  # what came before it counts
            case m.Finish():
                await self._settle()
                expired = await self.ledger.finish(learner=message.incarnation)
                log.info("run finished", groups_expired=expired)

    async def _learner_joined(self, hello: m.LearnerHello) -> None:
        if hello.run != self.config.run.name:
            raise RefusedError(identity.of_another_run(self.config, "learner", hello.run))
        disagreement = identity.disagreement(hello, self.config)
        if disagreement:
            if hello.incarnation != self._greeted:
                identity.require_newcomer(hello.incarnation, await self.ledger.learner(), disagreement)
            raise RefusedError(disagreement)
        mine = identity.of_learner(hello)
        other = identity.change(mine, await self.ledger.identify(mine))
        if other:
            raise RefusedError(other)
        back, forgotten = await self.ledger.restart(hello.step, learner=hello.incarnation)
        if back or hello.incarnation != self._greeted:  # else it has asked again
            log.info("learner joined", step=hello.step, groups_back_to_ready=back)
        self._greeted = hello.incarnation
        if forgotten:
            log.error("groups of undone steps were forgotten and can't be trained on again", steps=forgotten)

    async def _publish(self, message: m.Published) -> None:
        await self.ledger.publish(message.version, evaluate=message.evaluate, learner=message.incarnation)
        if message.evaluate:  # not before: a sweep that has just asked the ledger would put back the version before
            self.ticketing.evaluating = message.version

    async def _state(self, request: int) -> m.State:
        standing = await self.ledger.standing()
        servers = self.ticketing.servers.values()
        return m.State(
            request=request,
            version=standing.version,
            counts=msgspec.structs.replace(standing.counts, dropped_frames=self.dropped_frames),
            servers=[server.credits.status for server in servers if server.credits],
            evals=await self.ledger.eval_reports(standing.evaluated),
            length_bias=self._length_bias,
            tasks=dict(standing.tasks),
        )

    def _gone(self, peer: bytes) -> None:
        self.ticketing.servers.pop(peer, None)

    def _group_malformed(self, group_id: str, error: FrameError, outcome: str) -> None:
        self._dropped("group malformed", group=group_id, reason=str(error))
        if group_id.startswith("e") and outcome == "filtered":
            self.ticketing.ask_all_again()

    def _dropped(self, event: str, **fields: str) -> None:
        """Counts what was malformed; says so now and then, because anybody can send a lot of it."""
        self.dropped_frames += 1
        if self._dropped_news.due():
            log.warning(event, dropped=self.dropped_frames, **fields)


def _now() -> float:
    return asyncio.get_running_loop().time()
