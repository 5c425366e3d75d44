"""A rollout server's side of the weight channel: receives versions in the background and installs them.

One request of the learner is handled at a time. A new one cancels the one before it, except an update of the engine,
which is always finished.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import zmq
import zmq.asyncio

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.auth import LEARNER, ROLLOUT, client_keys
from slipstream.buffer.wire.codec import FrameError, decode, encode
from slipstream.buffer.wire.sockets import connect_dealer, send_and_close
from slipstream.buffer.wire.weights import protocol as w
from slipstream.buffer.wire.weights.fabric import TransferError
from slipstream.buffer.wire.weights.layout import SegmentError, host_identity
from slipstream.configs import RunConfig
from slipstream.configs.runtime.logging import WaitLog, get_log
from slipstream.configs.runtime.network import tcp_address
from slipstream.configs.runtime.threads import run_in_thread
from slipstream.configs.schema.weights import TRANSPORTS, SecurityConfig
from slipstream.models.device_memory import gpu_id
from slipstream.rollout_servers.engines.base import DirectSource, Engine, UpdateFailed
from slipstream.rollout_servers.engines.staging import SourceGone, Staging
from slipstream.rollout_servers.weights.receivers import Receiver, build_receiver, build_receivers
from slipstream.rollout_servers.weights.verify import WrongWeights, verify

log, evaluation_log = get_log("rollout.weights"), get_log("rollout.evaluation")

JOIN_S = 1.0
LEARNER_MS = 1000
"""Between two looks whether the learner is there."""
GRACE_S = 5.0
"""A receiver's own deadline comes first: its error says more."""


@dataclass
class WeightFollower:
    """Follows the learner; `on_applied` is called after each update."""

    config: RunConfig
    server: str
    engine: "Restartable"
    hold: "EvaluationHold"
    on_applied: Callable[[], None]
    last_update: "WeightUpdate | None" = field(default=None, init=False)

    async def run(self, context: zmq.asyncio.Context) -> None:
        """Serves until cancelled. Raises: EngineError when the engine fails for good."""
        address = tcp_address(self.config.weights.host, self.config.weights.control_port)
        keys = client_keys(self.config.security, ROLLOUT, service=LEARNER)
        self._socket = connect_dealer(context, address, identity=self.server, keys=keys, queue_offline=False)
        self._inbound = Inbound(self.config.run.name, self.config.security, self.engine)
        self._work: asyncio.Task[None] | None = None
        self._installing = False
        self._announced: w.Announce | None = None
        self._announced_at = 0.0
        self._host = host_identity()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._announce_presence(WaitLog(log, "the learner", address=address)))
                tasks.create_task(self._follow(tasks))
        finally:
            self._inbound.close()
            send_and_close(self._socket, encode(w.Leave()))

    async def _announce_presence(self, learner: WaitLog) -> None:
        while True:
            # A learner that comes after hours is to hear of this server as it is then.
            while not await self._socket.poll(LEARNER_MS, zmq.POLLOUT):  # type: ignore[call-arg]  # annotated without
                learner.waiting(request="weights")
                self._inbound.learner_gone()
            learner.arrived()
            await self._send_join()
            with suppress(TimeoutError):
                async with asyncio.timeout(JOIN_S):
                    await self.hold.changed.wait()
            self.hold.changed.clear()

    async def _send_join(self) -> None:
        direct = self.engine.direct
        await self._send(
            w.Join(
                run=self.config.run.name,
                server=self.server,
                incarnation=self.engine.incarnation,
                version=self.engine.version,
                staged=self._inbound.staging.version,
                host=self._host,
                device=gpu_id(self.engine.device) or self._host,
                transports=self._inbound.transports,
                workers=1 if direct is None else direct.workers,
                holding=self._holds,
            )
        )

    @property
    def _holds(self) -> bool:
        """True if the version must stay; an engine that was started anew can't finish its evaluation."""
        return self.hold.active and self.engine.ready

    async def _follow(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            try:
                message = decode(await self._socket.recv(), w.FromLearner)
            except FrameError as error:
                log.warning("frame from the learner dropped", reason=str(error))
                continue
            if isinstance(message, w.Ping):
                continue
            if isinstance(message, w.Queued):
                log.info("queued for the next version", ahead=message.ahead)
                continue
            if isinstance(message, w.Evicted):
                log.warning("evicted by the learner", reason=message.reason, retry_s=message.retry_s)
                if not self._inbound.holds_half:
                    continue  # what it fetches may still be of use
            if self._work is not None:
                if not self._installing:
                    self._work.cancel()
                await asyncio.wait([self._work])
            self._work = tasks.create_task(self._handle(message))

    async def _handle(self, message: Any) -> None:
        stage = type(message).__name__.lower()
        try:
            await self._answer(message)
        except (UpdateFailed, TransferError, SegmentError, WrongWeights) as error:
            self._announced = None
            await self._inbound.break_off(str(error))
            log.warning("weight update failed", stage=stage, reason=str(error))
            gone = isinstance(error, SourceGone)
            await self._send(w.Failed(transfer=message.transfer, stage=stage, detail=str(error), gone=gone))

    async def _answer(self, message: Any) -> None:
        if not isinstance(message, w.Apply):
            await self._inbound.break_off("the learner has given up a version that was on its way into the engine")
        match message:
            case w.Form():
                await self._inbound.enter(message)
                log.info("entered transfer group", epoch=message.epoch, world=message.world)
                await self._send(w.Entered(transfer=message.transfer))
            case w.Announce():
                self._inbound.check(message)
                if self._inbound.stops_generation(message.transport):
                    await self._finish_evaluation()
                self._announced, self._announced_at = message, time.monotonic()
                await self._send(w.Ready(transfer=message.transfer, version=message.manifest.version))
                if message.source is not None:
                    await self._receive(message)
            case w.Sending():
                await self._receive(self._announcement(message))
            case w.Apply():
                await self._apply(self._announcement(message))

    def _announcement(self, message: w.Sending | w.Apply) -> w.Announce:
        announced = self._announced
        if announced is None or (announced.transfer, announced.manifest.version) != (message.transfer, message.version):
            raise TransferError(f"version {message.version} was not announced in transfer {message.transfer}")
        return announced

    async def _receive(self, announce: w.Announce) -> None:
        await self._inbound.receive(announce)
        loaded = w.Loaded(transfer=announce.transfer, version=announce.manifest.version)
        if not self._inbound.holds_half:
            await self._send(loaded)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(announce.deadline_s):  # also to say so: the learner may be gone
                await self._send(loaded)
                await asyncio.Event().wait()  # the word to apply it ends this
        await self._inbound.break_off(
            f"the learner did not say within {announce.deadline_s:g} s that version {announce.manifest.version}, "
            "which is in the engine, is to be applied"
        )

    async def _finish_evaluation(self) -> None:
        """Waits if an evaluation began after the learner sent its request: its deadline rests meanwhile."""
        if self._holds:
            await self.hold.released()

    async def _apply(self, announce: w.Announce) -> None:
        manifest = announce.manifest
        if not self._inbound.stops_generation(announce.transport):
            await self._finish_evaluation()
        self._installing = True
        try:
            stall_s = await self._inbound.install(announce)
        finally:
            self._installing = False
        self._announced = None
        self.last_update = WeightUpdate(stall_s=stall_s, took_s=time.monotonic() - self._announced_at)
        if manifest.evaluate:
            self.hold.hold(manifest.version)
            await self._send_join()  # before Applied, or the learner might send the next version
        self.on_applied()
        try:
            verdict = await verify(self.engine, manifest, self.config.weights, dtype=self.config.model.dtype_here)
        except WrongWeights as error:
            await self.engine.fail(str(error))
            raise
        await self._send(
            w.Applied(
                transfer=announce.transfer,
                version=manifest.version,
                stall_s=stall_s,
                verified=verdict.how,
                deviation=verdict.deviation,
            )
        )

    async def _send(self, message: m.Message) -> None:
        await self._socket.send(encode(message))


@dataclass(frozen=True)
class WeightUpdate:
    """Times of an update of the engine.

    Attributes:
        stall_s: pause of generation.
        took_s: from its announcement until the engine had it.
    """

    stall_s: float
    took_s: float


class Restartable(Engine, Protocol):
    """An engine that is started anew when it fails."""

    @property
    def ready(self) -> bool:
        """True if it answers requests: not between its end and the first update after it was started anew."""
        ...

    @property
    def incarnation(self) -> str:
        """Another one after each start; empty while there is no engine."""
        ...

    async def fail(self, reason: str) -> None:
        """Gives up the engine that runs, as if it had died."""
        ...


@dataclass(frozen=True)
class _DirectInstall:
    """A version on its way straight into the engine `incarnation`, which can't be taken back."""

    incarnation: str
    source: DirectSource
    task: "asyncio.Task[float]"


class Inbound:
    """Receivers, the memory that they fill (`staging`), and the engine that installs it."""

    def __init__(self, run: str, security: SecurityConfig, engine: Restartable) -> None:
        self._run = run
        self._security = security
        self._engine = engine
        self._receivers: dict[str, Receiver] = build_receivers(security)
        self.staging = self._new_staging()
        self._epoch: int | None = None
        self._entered = ""
        self._half: _DirectInstall | None = None

    @property
    def transports(self) -> list[str]:
        """Names of the transports that a version can come through.

        Not straight into an engine that is dead, or was just started anew: all others would wait for it in vain.
        """
        direct = self._engine.direct
        return [*([] if direct is None or not self._engine.ready else [direct.name]), *self._receivers]

    async def enter(self, form: w.Form) -> None:
        """Enters a transfer group. Raises: TransferError, UpdateFailed, EngineError."""
        self._epoch = None
        if self.stops_generation(form.transport):
            await self._engine.join(form)
        else:
            await self._blocking(form.transport, form.deadline_s, lambda receiver: receiver.enter(form))
        self._epoch, self._entered = form.epoch, self._engine.incarnation

    def check(self, announce: w.Announce) -> None:
        """Raises: TransferError when a version can't come this way."""
        if announce.transport not in self.transports:
            raise TransferError(f"transport {announce.transport} is not among {', '.join(self.transports)}")
        if announce.epoch is not None and announce.epoch != self._epoch:
            raise TransferError(f"in transfer group {self._epoch}, not in {announce.epoch}")
        if announce.transport not in self._receivers and self._engine.incarnation != self._entered:
            raise TransferError(f"the engine that entered transfer group {self._epoch} died")

    def stops_generation(self, transport: str) -> bool:
        """True if generation stands still from the first byte of a version on, not only while it is applied."""
        direct = self._engine.direct
        return direct is not None and direct.name == transport

    @property
    def holds_half(self) -> bool:
        """True if a version is on its way straight into the engine, which can't be taken back."""
        return self._half is not None

    async def receive(self, announce: w.Announce) -> None:
        """Returns when all bytes are there. Raises: TransferError, UpdateFailed, SegmentError, EngineError."""
        if self.stops_generation(announce.transport):
            manifest, source = announce.manifest, DirectSource(announce.transport)
            task = asyncio.create_task(self._engine.install(manifest.version, manifest, source))
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # looked at, for asyncio
            task.add_done_callback(lambda _: source.received.set())
            self._half = _DirectInstall(self._engine.incarnation, source, task)
            await source.received.wait()
            if task.done():
                self._half = None  # the engine is whole, or dead
                task.result()
        else:
            staging = self.staging
            await self._blocking(
                announce.transport, announce.deadline_s, lambda receiver: receiver.receive(announce, staging)
            )

    async def install(self, announce: w.Announce) -> float:
        """Makes the version the one that generates; seconds of stall. Raises: UpdateFailed, EngineError."""
        manifest, half = announce.manifest, self._half
        if not self.stops_generation(announce.transport):
            return await self._engine.install(manifest.version, manifest, self.staging)
        if half is None:
            raise TransferError(f"version {manifest.version} was not received")
        half.source.approved.set()
        try:
            return await half.task
        finally:  # the engine holds all of it, or has crashed
            self._half = None

    async def break_off(self, reason: str) -> None:
        """Gives the engine up if it holds half of a version: it would stand still for ever."""
        half, self._half = self._half, None
        if half is None:
            return
        if half.incarnation == self._engine.incarnation:
            await self._engine.fail(reason)
        half.task.cancel()

    def learner_gone(self) -> None:
        """Lets go of its segments: as long as they are mapped, those of the next learner may have no room."""
        for name, receiver in self._receivers.items():
            if TRANSPORTS[name].in_place:
                receiver.close()

    def close(self) -> None:
        """Leaves groups and frees memory."""
        if self._half is not None:
            self._half.task.cancel()
        for receiver in self._receivers.values():
            receiver.close()
        self.staging.abandon()

    async def _blocking(self, transport: str, deadline_s: float, call: Callable[[Receiver], None]) -> None:
        """Runs a receiver's call in a thread; one that is left behind keeps its memory to itself."""
        receiver = self._receivers.get(transport)
        if receiver is None:
            raise TransferError(f"transport {transport} is not among {', '.join(self.transports)}")
        calling = run_in_thread(call, receiver)
        try:
            async with asyncio.timeout(deadline_s + GRACE_S):
                await asyncio.shield(calling)
        except (TimeoutError, asyncio.CancelledError) as ended:
            # The thread may go on writing for a while: into memory that is nobody's any more.
            left_behind, self.staging = self.staging, self._new_staging()

            def ends(late: asyncio.Future[None]) -> None:
                left_behind.abandon()
                if not late.cancelled():
                    late.exception()  # nobody waits for it any more, but asyncio wants it to be looked at

            calling.add_done_callback(ends)
            run_in_thread(receiver.close)  # it may wait for the end of a group
            self._receivers[transport] = build_receiver(transport, self._security)
            if isinstance(ended, TimeoutError):
                raise TransferError(f"{transport} did not return within {deadline_s:g} s") from None
            raise

    def _new_staging(self) -> Staging:
        return Staging(self._run, shared=self._engine.shares_memory, device=self._engine.device)


class EvaluationHold:
    """Condition for applying the next version; ends by itself after `hold_s`.

    Attributes:
        changed: set when a hold begins or ends; whoever waits for it clears it.
    """

    def __init__(self, *, hold_s: float) -> None:
        self._hold_s = hold_s
        self._open: set[str] = set()
        self._held: int | None = None
        self._drained = -1
        self._expiry: asyncio.TimerHandle | None = None
        self._released = asyncio.Event()
        self._released.set()
        self.changed = asyncio.Event()

    @property
    def active(self) -> bool:
        """True if the present version must stay."""
        return not self._released.is_set()

    @property
    def evaluating(self) -> bool:
        """True while answers of an evaluation are being generated."""
        return bool(self._open)

    def hold(self, version: int) -> None:
        """`version` is now running and is to be evaluated."""
        self._held = version
        self._update()

    def started(self, ticket: m.Ticket) -> None:
        """An evaluation ticket is being worked on."""
        self._open.add(ticket.id)
        self._update()

    def answered(self, ticket: m.Ticket) -> None:
        """An evaluation ticket has all its answers, or there will be none; scoring them needs no engine."""
        self._open.discard(ticket.id)
        self._update()

    def drained(self, version: int) -> None:
        """The buffer has no more evaluation tickets of `version`, or of an earlier one, for this server."""
        self._drained = max(version, self._drained)
        self._update()

    async def released(self) -> None:
        """Waits until newer weights may be applied."""
        await self._released.wait()

    def _update(self) -> None:
        active = bool(self._open) or (self._held is not None and self._held > self._drained)
        if active == self.active:
            return
        self.changed.set()
        if active:
            self._released.clear()
            self._expiry = asyncio.get_running_loop().call_later(self._hold_s, self._expire)
        else:
            self._released.set()
            if self._expiry is not None:
                self._expiry.cancel()

    def _expire(self) -> None:
        evaluation_log.warning(
            "evaluation not finished in time: newer weights may interrupt it",
            hold_s=self._hold_s,
            tickets=sorted(self._open),
            remedy="a larger eval.hold_s, or fewer tasks (eval.tasks)",
        )
        # What is left of this evaluation must not hold later versions too.
        self._held = None
        self._open.clear()
        self._update()
