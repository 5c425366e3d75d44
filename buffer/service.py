"""The buffer service: issues tickets, stores delivered groups, leases them.

All state is in Redis: after a restart of the service, peers repeat their hello and every message without an answer.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import zmq.asyncio
from redis.exceptions import RedisError

from slipstream.buffer import identity
from slipstream.buffer.handlers.fleet import Fleet
from slipstream.buffer.handlers.inspection import Inspected, Inspector
from slipstream.buffer.handlers.learner import LearnerHandler, LeaseQueue
from slipstream.buffer.handlers.peers import MalformedCounter, ReplySender, peer_name, prober
from slipstream.buffer.handlers.rollout import EventKeeper, Ingest, RolloutHandler
from slipstream.buffer.readings import Timer, readings
from slipstream.buffer.store.account import origin_of
from slipstream.buffer.store.kept import Keeper
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import MemoryGuard, Outage
from slipstream.buffer.store.server_checks import require_memory
from slipstream.buffer.store.spill import Spiller, SpillFolder
from slipstream.buffer.store.types import LedgerSnapshot
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.auth import LEARNER, ROLLOUT, proven_name
from slipstream.buffer.wire.codec import FrameError, SchemaVersionError, decode
from slipstream.configs import RunConfig, agreement
from slipstream.configs.runtime.exposition import Reading
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.threads import cancel_tasks

log = get_log("buffer.service")

SWEEP_S = 1.0
SPILL_UPKEEP_S = 60.0
"""Interval of removing unreferenced spill files, and of another attempt after a file that could not be written."""
GROUPS_CHECKED = 100_000
"""A larger ledger is not verified at the start: that would block Redis for more than two seconds."""
RETRY_S = 0.2
GRANT_PAUSE_PER_SERVER_S = 1e-4
"""Pause after a grant of tickets: with 256 servers 40 grants a second, with one hardly any pause."""
MAX_QUEUED_MESSAGES = 128
"""Decoded messages that wait for the service; further ones wait in the socket."""
CONTROL_BYTES = 4 << 20
FRAMES_PER_MESSAGE = 1 + m.GROUPS_PER_DELIVERY


@dataclass(frozen=True)
class ReceivedMessage:
    """A received message."""

    peer: bytes
    message: Any
    """A message of `ToService`, or the FrameError of a malformed frame."""
    groups: Sequence[Inspected] = ()
    """Groups of a delivery."""
    sender: str | None = None
    """Name of the key pair that the peer has proven to own; None without keys."""

    @property
    def has_foreign_key(self) -> bool:
        """True for a learner's message by another key than the learner's, and for a rollout server's alike."""
        owner = LEARNER if isinstance(self.message, m.FromLearner) else ROLLOUT
        return self.sender not in (owner, None) and isinstance(self.message, m.Message)


class MessageReceiver:
    """Receives, decodes and inspects messages in order, while earlier ones wait for Redis."""

    def __init__(self, inspector: Inspector, socket: zmq.asyncio.Socket) -> None:
        self._inspector = inspector
        self._socket = socket
        self._received: asyncio.Queue[ReceivedMessage] = asyncio.Queue(MAX_QUEUED_MESSAGES)

    async def run(self) -> None:
        """Receives until cancelled."""
        while True:
            # Not copied: a group's bytes go from ZeroMQ's memory into Redis's socket.
            peer, *frames = await self._socket.recv_multipart(copy=False)
            received = self._read(peer.bytes, [frame.buffer for frame in frames])
            await self._received.put(replace(received, sender=proven_name(peer)))
            await asyncio.sleep(0)  # neither call yields while frames are waiting, which would starve the other tasks

    async def next(self) -> ReceivedMessage:
        """The next message."""
        return await self._received.get()

    def _read(self, peer: bytes, frames: Sequence[memoryview]) -> ReceivedMessage:
        try:
            if not 0 < len(frames) <= FRAMES_PER_MESSAGE or len(frames[0]) > CONTROL_BYTES:
                raise FrameError(f"{len(frames)} frames, or one of control of more than {CONTROL_BYTES} bytes")
            message = decode(frames[0], m.ToService)
            groups = self._inspect(peer, message, frames[1:]) if isinstance(message, m.Deliver) else ()
            return ReceivedMessage(peer, message, groups)
        except FrameError as error:
            return ReceivedMessage(peer, error)

    def _inspect(self, peer: bytes, delivery: m.Deliver, blobs: Sequence[memoryview]) -> Sequence[Inspected]:
        if len(blobs) != len(delivery.ids):
            raise FrameError(f"{len(delivery.ids)} groups announced, {len(blobs)} sent")
        server = peer_name(peer)
        return [
            self._inspector.inspect(group_id, blob, origin_of(group_id, server, delivery.sampled))
            for group_id, blob in zip(delivery.ids, blobs, strict=True)
        ]


class BufferService:
    """One run's buffer service, over a bound ROUTER socket.

    Concurrent tasks receive messages, answer learners, store groups, grant leases and tickets, and apply deadlines, so
    that a learner's lease does not wait for groups that are being stored. Each change of the ledger is atomic in Redis.

    Attributes:
        socket: the bound ROUTER; the caller closes it.
        fleet: the live rollout servers.
        malformed: count of frames and groups that were dropped as malformed.
    """

    def __init__(self, config: RunConfig, ledger: Ledger, socket: zmq.asyncio.Socket, outage: Outage) -> None:
        """`outage` is shared with the ledger's connection."""
        self.config = config
        self.ledger = ledger
        self.socket = socket
        self._send = ReplySender(socket, self._gone)
        self._memory = MemoryGuard()
        self._outage = outage
        self._receiver = MessageReceiver(Inspector(config), socket)
        self._spiller = Spiller(ledger.scripts, SpillFolder(config.paths.spill), spill_bytes=ledger.spill_bytes)
        self._keeper = Keeper(ledger.scripts, config)
        self._lease_queue = LeaseQueue(ledger, self._spiller, self._memory, self._send)
        self.fleet = Fleet(config, ledger, self._send, self._memory)
        self.malformed = MalformedCounter()
        self._ingest = Ingest(ledger, self.fleet, self.malformed, self._memory, self._send)
        self._events = EventKeeper(ledger, self._memory, self._send)
        self._rollout = RolloutHandler(agreement.server_settings(config), ledger, self.fleet, self._ingest, self._send)
        self._learner = LearnerHandler(
            agreement.learner_settings(config),
            ledger,
            self.fleet,
            self.malformed,
            self._ingest,
            lambda: self._spiller.errors + self._keeper.errors,
            self._send,
            prober(socket),
        )
        self._requests: asyncio.Queue[ReceivedMessage] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self._delivered, self._may_lease, self._may_issue = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._may_spill, self._may_keep = asyncio.Event(), asyncio.Event()
        # No server counts as silent before this time: servers notice a restart of the service only after a while.
        self._silence_counts_from = 0.0
        self._swept_at = float("-inf")
        self._timer = Timer()
        self._standing: LedgerSnapshot | None = None
        """Of the last sweep."""

    def readings(self) -> Iterable[Reading]:
        """Metrics for Prometheus; none before the first sweep."""
        if self._standing is None:
            return ()
        servers = list(self.fleet.servers.items())
        credits = {peer_name(peer): server.credits for peer, server in servers if server.credits is not None}
        return readings(self._standing, credits, length_bias=self._learner.length_bias, timer=self._timer)

    async def run(self) -> None:
        """Serves until cancelled.

        Raises: ConfigError when the run was started or is running with other settings, or Redis may evict keys;
        DeadlineError when Redis is unusable for `redis.outage_deadline_s`.
        """
        while not (await self._through_outages(self._open()) and await self._through_outages(self._verify())):
            pass
        lanes = [
            asyncio.create_task(lane)
            for lane in (
                self._receiver.run(),
                self._sweep_regularly(),
                self._dispatch_messages(),
                self._answer_learners(),
                self._run_on(self._delivered, self._store),
                self._run_on(self._may_keep, self._events.keep),
                self._grant_leases(),
                self._run_on(self._may_issue, self._grant_tickets),
                self._spill_regularly(),
                self._forget_regularly(),
            )
        ]
        try:
            await asyncio.wait(lanes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_tasks(*lanes)

    async def _open(self) -> None:
        config = self.config
        require_memory(
            await self.ledger.require_durable(config.redis.address),
            buffer=config.buffer,
            learner=config.learner,
            rollout=config.rollout,
            groups_per_version=config.groups_per_version,
        )
        identity.require_same_identity(self.config, await self.ledger.identify(identity.config_identity(self.config)))

    async def _verify(self) -> None:
        problems = await self.ledger.verify(most=GROUPS_CHECKED)
        if problems:
            log.error(
                "the ledger is damaged",
                problems=len(problems),
                first=problems[0],
                remedy="`slipstream ledger verify` lists them; restore Redis's data or choose another run.name",
            )

    async def _stay_open(self) -> None:
        """Starts an empty ledger when Redis was flushed or started without its file."""
        if identity.config_identity(self.config).keys() <= (await self.ledger.identity()).keys():
            return
        await self._open()
        self.fleet.servers.clear()  # their next hello registers them again, with the sizes of their envs
        log.error(
            "Redis has lost the run's ledger (flushed, restarted without its file, or keys evicted); the run continues "
            "with an empty ledger, without the earlier steps",
            redis=self.config.redis.address,
        )

    async def _through_outages(self, work: Awaitable[object]) -> bool:
        """Runs work; returns False after a Redis error. Raises: DeadlineError when Redis is unusable for too long."""
        try:
            await work
        except RedisError as error:
            self._outage.failed(error)
            self._silence_counts_from = _now() + self.config.buffer.server_deadline_s
            await asyncio.sleep(RETRY_S)
            return False
        return True

    # --- concurrent tasks ---------------------------------------------------------------------------------------------

    async def _dispatch_messages(self) -> None:
        while True:
            await self._through_outages(self._dispatch(await self._receiver.next()))

    async def _answer_learners(self) -> None:
        while True:
            request = await self._requests.get()
            if isinstance(request.message, m.Finish):  # the service may be stopped once it is answered
                await self._through_outages(self._keeper.keep())
            await self._through_outages(self._learner.answer(request.peer, request.message))
            if isinstance(request.message, m.LearnerHello):
                await self._keeper.undo(request.message.step)
            if isinstance(request.message, m.Trained):
                self._may_spill.set()
            self._wake()

    async def _sweep_regularly(self) -> None:
        while True:
            swept = await self._through_outages(self._sweep())
            self._swept_at = _now()
            if swept:
                self._outage.recovered()
                self._wake()
                await asyncio.sleep(SWEEP_S)

    async def _grant_leases(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._lease_queue.until):
                    await self._may_lease.wait()
            self._may_lease.clear()
            await self._through_outages(self._lease())

    async def _spill_regularly(self) -> None:
        upkeep_at = _now()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(upkeep_at):
                    await self._may_spill.wait()
            self._may_spill.clear()
            await self._through_outages(self._spiller.spill())
            if _now() >= upkeep_at and await self._through_outages(self._spiller.remove_unreferenced()):
                upkeep_at = _now() + SPILL_UPKEEP_S

    async def _forget_regularly(self) -> None:
        while True:
            if await self._through_outages(self._keeper.keep()):
                await self._through_outages(self.ledger.trim())
            await asyncio.sleep(SWEEP_S)

    async def _run_on(self, woken: asyncio.Event, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await woken.wait()
            woken.clear()
            await self._through_outages(work())

    def _wake(self, *, leases: bool = True) -> None:
        """Triggers the granting of leases and tickets after a change."""
        if leases and self._lease_queue:
            self._may_lease.set()
        self._may_issue.set()

    async def _store(self) -> None:
        with self._timer.time("store"):
            await self._ingest.store()
        self._wake()

    async def _lease(self) -> None:
        with self._timer.time("lease"):
            await self._lease_queue.grant()
        self._may_issue.set()

    async def _grant_tickets(self) -> None:
        with self._timer.time("tickets"):
            await self.fleet.grant()
        # Many servers' messages are handled together.
        await asyncio.sleep(len(self.fleet.servers) * GRANT_PAUSE_PER_SERVER_S)

    async def _sweep(self) -> None:
        await self._stay_open()
        await self._learner.check_connection()
        now, deadline_s = _now(), self.config.buffer.server_deadline_s
        if now - self._swept_at > 2 * SWEEP_S:  # just started, or a blocked event loop delayed heartbeats
            self._silence_counts_from = now + deadline_s
        check_silence = now >= self._silence_counts_from
        silences_s = self.fleet.silences_s(now)
        swept = await self.ledger.sweep(silent_s=deadline_s if check_silence else None, silences_s=silences_s)
        if swept.tickets or swept.leases or swept.slices or swept.silent:
            log.warning(
                "deadlines passed",
                tickets_reissued=swept.tickets,
                groups_back_to_ready=swept.leases,
                eval_slices_back=swept.slices,
                silent_servers=swept.silent,
            )
        if check_silence:
            self.fleet.forget(set(swept.silent))
        self.fleet.recheck_credits()
        self._standing = standing = await self.ledger.snapshot()
        self.fleet.evaluating = standing.evaluating
        if standing.slices_left:
            self.fleet.offer_evaluation()
        self._learner.length_bias = await self.ledger.length_bias(sorted(standing.counts.answers_dropped))

    # --- messages ---------------------------------------------------------------------------------------------------

    async def _dispatch(self, received: ReceivedMessage) -> None:
        peer, message = received.peer, received.message
        if received.has_foreign_key:
            reason = f"the key of {received.sender} may not send {type(message).__name__}"
            self.malformed.add("message of another key refused", peer=peer.hex(), reason=reason)
            await self._send(peer, m.Refused(reason=reason, request=getattr(message, "request", 0)))
            return
        server = self.fleet.servers.get(peer)
        if server is not None:
            server.last_message_at = _now()
        match message:
            case SchemaVersionError():
                self.malformed.add("peer of another release refused", peer=peer.hex(), reason=str(message))
                # In the peer's own version, otherwise it would drop the refusal as a frame of another release.
                await self._send(peer, m.Refused(v=message.version, reason=str(message), request=message.request))
            case FrameError():
                self.malformed.add("frame dropped", peer=peer.hex(), reason=str(message))
            case m.Credits() | m.Deliver() | m.GroupFailed() | m.KeepEvent() if server is None:
                await self._send(peer, m.UnknownPeer())
            case m.Deliver() if server is not None:
                hello = server.hello
                await self._ingest.take(
                    peer, received.groups, vocab_size=hello.vocab_size, train_tasks=hello.train_tasks
                )
                self._delivered.set()
            case m.KeepEvent():
                self._events.take(peer, message)
                self._may_keep.set()
            case _ if isinstance(message, m.FromLearner) and not isinstance(message, m.LeaseRequest):
                await self._requests.put(received)
            case _:
                await self._change(peer, message)
                self._wake(leases=not isinstance(message, m.Credits))

    async def _change(self, peer: bytes, message: m.Message) -> None:
        """Handles a message after which leases and tickets may be granted."""
        match message:
            case m.ServerGoodbye():
                await self._rollout.goodbye(peer, message)
            case m.ServerHello():
                await self._memory.attempt(self._rollout.hello(peer, message))
            case m.Credits():
                server = self.fleet.servers[peer]
                server.report(message, now=server.last_message_at)
            case m.GroupFailed():
                await self._rollout.failed(peer, message)
            case m.LeaseRequest():
                self._lease_queue.add(peer, message)

    def _gone(self, peer: bytes) -> None:
        self.fleet.servers.pop(peer, None)


def _now() -> float:
    return asyncio.get_running_loop().time()
