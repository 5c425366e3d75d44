"""The buffer service: issues tickets, stores what comes back, leases it. It holds nothing that Redis doesn't: whom it
talks to it learns anew, and whatever it was asked in vain is asked again."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import zmq.asyncio
from redis.exceptions import RedisError

from slipstream.buffer import identity
from slipstream.buffer.handlers.base import sender
from slipstream.buffer.handlers.ingest import Intake
from slipstream.buffer.handlers.learner import Learners, Leasing
from slipstream.buffer.handlers.rollout import Servers, Ticketing
from slipstream.buffer.reception import MOST_WAITING, Arrival, Malformed, Reception
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import Fullness, Outage
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import FrameError, SchemaVersionError
from slipstream.configs import RunConfig
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.threads import cancel_tasks

log = get_log("buffer.service")

SWEEP_S = 1.0
RETRY_S = 0.2


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
        malformed: what arrived that was no message, or a group that was none.
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
        self.malformed = Malformed()
        self._intake = Intake(ledger, self._send, self._group_malformed, self.ticketing.landed)
        self._servers = Servers(config, ledger, self.ticketing, self._settle, self._send)
        self._learners = Learners(config, ledger, self.ticketing, self.malformed, self._settle, self._send)
        self._asked: asyncio.Queue[Arrival] = asyncio.Queue(MOST_WAITING)
        self._delivered, self._may_lease, self._may_issue = asyncio.Event(), asyncio.Event(), asyncio.Event()
        # Nobody is judged silent before: servers that did not hear of this service's (re)start may speak first.
        self._judges_from = 0.0
        self._swept_at = float("-inf")

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
            await cancel_tasks(*lanes)

    async def _open(self) -> None:
        await self.ledger.require_durable(self.config.redis.address)
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
        except RedisError as error:
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
            await self._through_outages(self._learners.answer(asked.peer, asked.message))
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
        silences_s = self.ticketing.silences_s(now)
        swept = await self.ledger.sweep(silent_s=deadline_s if judging else None, silences_s=silences_s)
        await self.ledger.trim()
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
        self._learners.length_bias = await self.ledger.length_bias(sorted(standing.counts.answers_dropped))

    # --- messages ---------------------------------------------------------------------------------------------------

    async def _dispatch(self, arrival: Arrival) -> None:
        peer, message = arrival.peer, arrival.message
        server = self.ticketing.servers.get(peer)
        if server is not None:
            server.heard_at = _now()
        match message:
            case SchemaVersionError():
                self.malformed.note("peer of another release refused", peer=peer.hex(), reason=str(message))
                # In the peer's own version, or it would drop the refusal as this service drops its frames.
                await self._send(peer, m.Refused(v=message.version, reason=str(message), request=message.request))
                return
            case FrameError():
                self.malformed.note("frame dropped", peer=peer.hex(), reason=str(message))
                return
            case m.ServerGoodbye():
                await self._servers.part(peer, message)
            case m.Credits() | m.Deliver() | m.GroupFailed() if server is None:
                await self._send(peer, m.WhoAreYou())
                return
            case m.Deliver():
                await self._fullness.attempt(self._intake.take(peer, arrival.groups))
                self._delivered.set()
                return
            case m.ServerHello():
                await self._fullness.attempt(self._servers.welcome(peer, message))
            case m.Credits():
                await self._servers.hear(peer, message)
            case m.GroupFailed():
                await self._servers.failed(peer, message)
            case m.LeaseRequest():
                self._leasing.ask(peer, message)
            case _:
                await self._asked.put(arrival)
                return
        self._wake()

    def _gone(self, peer: bytes) -> None:
        self.ticketing.servers.pop(peer, None)

    def _group_malformed(self, group_id: str, error: FrameError, outcome: str) -> None:
        self.malformed.note("group malformed", group=group_id, reason=str(error))
        if outcome == "filtered":  # if it was a slice of an evaluation, another server may have it
            self.ticketing.ask_all_again()


def _now() -> float:
    return asyncio.get_running_loop().time()
