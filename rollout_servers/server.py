"""A rollout server: plays the episodes of its tickets, delivers the groups, follows the learner's weights."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq.asyncio

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import FrameError, decode, encode
from slipstream.buffer.wire.sockets import connect_dealer
from slipstream.configs import RunConfig
from slipstream.configs.errors import RefusedError, SlipstreamError
from slipstream.configs.logs import get_log
from slipstream.env.base import Split
from slipstream.rollout_servers.engines.base import Engine
from slipstream.rollout_servers.episode import EpisodeFailed, Player
from slipstream.rollout_servers.publisher import Publisher
from slipstream.rollout_servers.weights.hold import EvaluationHold
from slipstream.rollout_servers.weights.member import WeightMember

log = get_log("rollout.server")

HEARTBEAT_S = 1.0


@dataclass
class Work:
    """What the server has done so far, and whether it is at it."""

    ready_at: float = field(default_factory=time.monotonic)
    running: int = 0
    busy_since: float = 0.0
    busy_s: float = 0.0
    tokens: int = 0

    def begin(self) -> None:
        """An episode starts."""
        if not self.running:
            self.busy_since = time.monotonic()
        self.running += 1

    def end(self) -> None:
        """An episode ends."""
        self.running -= 1
        if not self.running:
            self.busy_s += time.monotonic() - self.busy_since

    def busy_so_far_s(self) -> float:
        """Time with at least one episode running."""
        return self.busy_s + (time.monotonic() - self.busy_since if self.running else 0.0)


class RolloutServer:
    """One engine's worth of episodes."""

    def __init__(self, config: RunConfig, name: str, player: Player) -> None:
        self._config = config
        self._name = name
        self._player = player
        self._engine: Engine = player.engine
        self._hello = m.ServerHello(
            run=config.run.name,
            env=config.env.name,
            env_fingerprint=player.env.fingerprint(),
            train_tasks=player.env.size("train"),
            eval_tasks=player.env.size("eval"),
            tokenizer_fingerprint=player.text.fingerprint(),
        )
        self._work = Work()
        self._hold = EvaluationHold()
        self._report = asyncio.Event()
        self._member = WeightMember(config, name, self._engine, self._hold, on_applied=self._report.set)

    async def run(self) -> None:
        """Serves until cancelled.

        Raises: RefusedError when the buffer refuses this server, EngineError when the engine dies.
        """
        context = zmq.asyncio.Context()
        try:
            self._socket = connect_dealer(context, self._config.buffer.endpoint, identity=self._name)
            self._publisher = Publisher(self._send, resend_s=self._config.rollout.resend_s)
            async with asyncio.TaskGroup() as tasks:
                self._episodes = tasks
                tasks.create_task(self._publisher.run())
                tasks.create_task(self._member.run(context))
                tasks.create_task(self._heartbeat())
                tasks.create_task(self._listen())
        except BaseExceptionGroup as group:
            raise _first(SlipstreamError, group) or group from None
        finally:
            context.destroy(linger=0)

    async def _listen(self) -> None:
        await self._send([encode(self._hello)])
        while True:
            try:
                message = decode(await self._socket.recv(), m.ToServer)
            except FrameError as error:
                log.warning("frame from the buffer dropped", reason=str(error))
                continue
            await self._handle(message)

    async def _handle(self, message: Any) -> None:
        match message:
            case m.Tickets():
                for ticket in message.tickets:
                    if ticket.kind == m.EVAL:
                        self._hold.started(ticket)
                    self._episodes.create_task(self._play(ticket))
            case m.Acknowledge():
                self._publisher.acknowledged(message.outcomes)
            case m.EvalDrained():
                self._hold.drained(message.version)
            case m.Welcome():
                log.info("joined the buffer", version=message.version)
                self._publisher.resend_all()
                self._report.set()
            case m.WhoAreYou():
                await self._send([encode(self._hello)])
            case m.Refused():
                raise RefusedError(f"the buffer at {self._config.buffer.endpoint} refused: {message.reason}")

    async def _heartbeat(self) -> None:
        while True:
            await self._send([encode(m.Credits(capacity=self._config.rollout.groups_in_flight, status=self._status()))])
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._report.wait()
            except TimeoutError:
                pass  # nothing changed: this is the regular heartbeat
            self._report.clear()

    async def _play(self, ticket: m.Ticket) -> None:
        self._work.begin()
        try:
            async with asyncio.timeout(self._config.rollout.group_deadline_s):
                trajectories = await self._trajectories(ticket)
        except TimeoutError:
            detail = f"no answer within rollout.group_deadline_s={self._config.rollout.group_deadline_s:.0f}"
            self._fail(ticket, EpisodeFailed("generation_timeout", detail))
        except EpisodeFailed as error:
            self._fail(ticket, error)
        else:
            self._work.tokens += sum(sum(trajectory.action_mask) for trajectory in trajectories)
            self._publisher.deliver(
                m.Group(
                    id=ticket.id,
                    kind=ticket.kind,
                    epoch=ticket.epoch,
                    indices=ticket.indices,
                    trajectories=trajectories,
                )
            )
        finally:
            self._work.end()
            if ticket.kind == m.EVAL:
                self._hold.finished(ticket)

    async def _trajectories(self, ticket: m.Ticket) -> list[m.Trajectory]:
        split: Split = "eval" if ticket.kind == m.EVAL else "train"
        try:
            async with asyncio.TaskGroup() as tasks:
                episodes = [
                    tasks.create_task(self._player.play(split, index, samples=ticket.samples))
                    for index in ticket.indices
                ]
        except BaseExceptionGroup as group:
            _, others = group.split(EpisodeFailed)
            raise others or _first(EpisodeFailed, group) or group from None
        return [trajectory for episode in episodes for trajectory in episode.result()]

    def _fail(self, ticket: m.Ticket, error: EpisodeFailed) -> None:
        log.warning("episode failed", ticket=ticket.id, reason=error.reason, detail=error.detail)
        self._publisher.fail(m.GroupFailed(id=ticket.id, reason=error.reason, detail=error.detail, tokens=error.tokens))

    def _status(self) -> m.ServerStatus:
        stalls = self._member.stalls
        return m.ServerStatus(
            server=self._name,
            version=self._engine.version,
            tokens_generated=self._work.tokens,
            busy_s=self._work.busy_so_far_s(),
            up_s=time.monotonic() - self._work.ready_at,
            updates=stalls.updates,
            stall_s=stalls.total_s,
            stall_max_s=stalls.max_s,
        )

    async def _send(self, frames: Sequence[bytes]) -> None:
        await self._socket.send_multipart(frames)


def _first(kind: type[Exception], group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """The first error of a kind in what a TaskGroup raised, None without one."""
    found: BaseException | None = group.subgroup(kind)
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
