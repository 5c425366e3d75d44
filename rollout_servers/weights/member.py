"""A rollout server's side of the weight channel: joins the transfer group, receives versions, applies them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq.asyncio

from slipstream.buffer.wire import weights as w
from slipstream.buffer.wire.codec import FrameError, decode, encode
from slipstream.buffer.wire.curve import client_keys
from slipstream.buffer.wire.messages import Message
from slipstream.buffer.wire.sockets import connect_dealer
from slipstream.configs import RunConfig
from slipstream.configs.logs import get_log
from slipstream.rollout_servers.engines.base import Engine, UpdateFailed
from slipstream.rollout_servers.weights.hold import EvaluationHold

log = get_log("rollout.weights")

JOIN_S = 1.0


@dataclass
class Stalls:
    """How long generation stood still for updates."""

    updates: int = 0
    total_s: float = 0.0
    max_s: float = 0.0

    def add(self, stall_s: float) -> None:
        """Counts one update."""
        self.updates += 1
        self.total_s += stall_s
        self.max_s = max(self.max_s, stall_s)


@dataclass
class WeightMember:
    """Follows the learner; `on_applied` is called after each update."""

    config: RunConfig
    server: str
    engine: Engine
    hold: EvaluationHold
    on_applied: Callable[[], None]
    stalls: Stalls = field(default_factory=Stalls)
    epoch: int = -1
    announced: w.Manifest | None = None

    async def run(self, context: zmq.asyncio.Context) -> None:
        """Serves until cancelled. Raises: EngineError when the engine fails."""
        address = f"tcp://{self.config.weights.host}:{self.config.weights.control_port}"
        socket = connect_dealer(context, address, identity=self.server, keys=client_keys(self.config.security))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._announce_presence(socket))
            tasks.create_task(self._follow(socket))

    async def _announce_presence(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            await socket.send(
                encode(
                    w.Join(
                        run=self.config.run.name,
                        server=self.server,
                        epoch=self.epoch,
                        version=self.engine.version,
                        workers=self.engine.workers,
                    )
                )
            )
            await asyncio.sleep(JOIN_S)

    async def _follow(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            try:
                message = decode(await socket.recv(), w.FromLearner)
            except FrameError as error:
                log.warning("frame from the learner dropped", reason=str(error))
                continue
            try:
                reply = await self._obey(message)
            except UpdateFailed as error:
                self.announced = None
                reply = w.Failed(stage=type(message).__name__.lower(), detail=str(error))
                log.warning("weight update failed", stage=reply.stage, reason=reply.detail)
            if reply is not None:
                await socket.send(encode(reply))

    async def _obey(self, message: Any) -> Message | None:
        match message:
            case w.Form():
                await self.engine.join(message)
                self.epoch = message.epoch
                log.info("entered transfer group", epoch=message.epoch, world=message.world)
                return None
            case w.Announce() if message.epoch != self.epoch:
                return w.Failed(stage="announce", detail=f"in epoch {self.epoch}, not in {message.epoch}")
            case w.Announce():
                self.announced = message.manifest
                await self.engine.receive(message.manifest)
                return w.Ready(version=message.manifest.version)
            case w.Sent() if self.announced is None or self.announced.version != message.version:
                return w.Failed(stage="sent", detail=f"version {message.version} was not announced")
            case w.Sent():
                return await self._apply()
        raise AssertionError(f"unhandled message {message!r}")

    async def _apply(self) -> w.Applied:
        manifest = self.announced
        assert manifest is not None, "Sent is only obeyed after Announce"
        # Half of what the learner allows for the answer: an evaluation must not get this server evicted.
        if not await self.hold.released(min(self.config.eval.deadline_s, self.config.weights.deadline_s / 2)):
            log.warning("evaluation not finished in time, going on", version=self.engine.version)
        stall_s = await self.engine.apply(manifest)
        self.announced = None
        self.stalls.add(stall_s)
        if manifest.evaluate:
            self.hold.hold(manifest.version)
        self.on_applied()
        return w.Applied(version=manifest.version, stall_s=stall_s)
