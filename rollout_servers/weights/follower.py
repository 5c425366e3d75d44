"""A rollout server's side of the weight channel: receives versions in the background and installs them.

One request of the learner is handled at a time. A new one cancels the one before it, except an update of the engine,
which is always finished.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from slipstream.buffer.wire.auth import LEARNER, ROLLOUT, client_keys
from slipstream.buffer.wire.codec import FrameError, decode, encode
from slipstream.buffer.wire.messages import Message
from slipstream.buffer.wire.sockets import connect_dealer, send_and_close
from slipstream.buffer.wire.weights import protocol as w
from slipstream.buffer.wire.weights.shm import SegmentError, host_identity
from slipstream.configs import RunConfig
from slipstream.configs.runtime.logging import WaitLog, get_log
from slipstream.configs.runtime.network import tcp_address
from slipstream.rollout_servers.engines.base import UpdateFailed
from slipstream.rollout_servers.engines.staging import SourceGone, TransferFailed
from slipstream.rollout_servers.weights.eval_hold import EvaluationHold
from slipstream.rollout_servers.weights.inbound import Inbound, Restartable
from slipstream.rollout_servers.weights.verify import WrongWeights, verify

log = get_log("rollout.weights")

JOIN_S = 1.0
LEARNER_MS = 1000
"""Between two looks whether the learner is there."""


@dataclass
class WeightFollower:
    """Follows the learner; `on_applied` is called after each update."""

    config: RunConfig
    server: str
    engine: Restartable
    hold: EvaluationHold
    on_applied: Callable[[], None]

    async def run(self, context: zmq.asyncio.Context) -> None:
        """Serves until cancelled. Raises: EngineError when the engine fails for good."""
        address = tcp_address(self.config.weights.host, self.config.weights.control_port)
        keys = client_keys(self.config.security, ROLLOUT, service=LEARNER)
        self._socket = connect_dealer(context, address, identity=self.server, keys=keys, queue_offline=False)
        self._inbound = Inbound(self.config.run.name, self.config.security, self.engine)
        self._work: asyncio.Task[None] | None = None
        self._installing = False
        self._announced: w.Announce | None = None
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
                staged=self._inbound.staged,
                host=self._host,
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
        except (UpdateFailed, TransferFailed, SegmentError, WrongWeights) as error:
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
                self._announced = message
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
            raise TransferFailed(f"version {message.version} was not announced in transfer {message.transfer}")
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

    async def _send(self, message: Message) -> None:
        await self._socket.send(encode(message))
