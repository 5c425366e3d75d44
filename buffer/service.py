"""The buffer service: issues tickets, stores what comes back, leases it. It holds no group; the ledger is in Redis."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from slipstream.buffer.store import EVAL_SLICE, DeliveredGroup, EvalSlice, RedisStore
from slipstream.buffer.tasks import task_order
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import FrameError, action_tokens, decode, decode_group, encode, oldest_version
from slipstream.configs import RunConfig
from slipstream.configs.logs import get_log

log = get_log("buffer.service")

SWEEP_S = 1.0
SERVER_SILENT_S = 10.0
MESSAGES_PER_GRANT = 1000


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
    store: RedisStore
    socket: zmq.asyncio.Socket
    servers: dict[bytes, Server] = field(default_factory=dict)
    waiting: list[PendingLease] = field(default_factory=list)
    evaluating: int | None = None
    dropped_frames: int = 0

    async def run(self) -> None:
        """Serves until cancelled."""
        self.evaluating = await self.store.evaluating()
        sweep_at = _now()
        while True:
            # Work through what has arrived before granting: groups come in bursts, and one grant serves them all.
            # Bounded: a peer that never stops sending must not keep the others from being granted anything.
            timeout_ms = max(0, round((sweep_at - _now()) * 1000))
            for _ in range(MESSAGES_PER_GRANT):
                if not await self.socket.poll(timeout_ms):
                    break
                await self._handle(await self.socket.recv_multipart())
                timeout_ms = 0
            if _now() >= sweep_at:
                sweep_at = _now() + SWEEP_S
                await self._sweep()
            await self._grant()

    async def _sweep(self) -> None:
        tickets, leases = await self.store.sweep()
        if tickets or leases:
            log.warning("deadlines passed", tickets_reissued=tickets, groups_back_to_ready=leases)

    # --- messages ---------------------------------------------------------------------------------------------------

    async def _handle(self, frames: list[bytes]) -> None:
        peer, *rest = frames
        try:
            if not rest:
                raise FrameError("an empty message")
            message = decode(rest[0], m.ToService)
            await self._dispatch(peer, message, rest[1:])
        except FrameError as error:
            self.dropped_frames += 1
            log.warning("frame dropped", peer=peer.hex(), reason=str(error), dropped=self.dropped_frames)

    async def _dispatch(self, peer: bytes, message: Any, blobs: list[bytes]) -> None:
        match message:
            case m.ServerHello():
                await self._welcome(peer, message)
            case m.Credits() | m.Deliver() | m.GroupFailed() if peer not in self.servers:
                await self._send(peer, m.WhoAreYou())
            case m.Credits():
                server = self.servers[peer]
                server.credits, server.heard_at = message, _now()
            case m.Deliver():
                await self._deliver(peer, message, blobs)
            case m.GroupFailed():
                outcome = await self.store.fail(message.id, reason=message.reason, tokens=message.tokens)
                log.warning("group failed", group=message.id, reason=message.reason, detail=message.detail)
                await self._send(peer, m.Acknowledge(outcomes={message.id: outcome}))
            case m.LeaseRequest():
                self.waiting = [pending for pending in self.waiting if pending.peer != peer]
                self.waiting.append(PendingLease(peer, message, _now() + message.wait_s))
            case _:
                await self._learner(peer, message)

    async def _welcome(self, peer: bytes, hello: m.ServerHello) -> None:
        difference = self._difference(peer, hello)
        if difference:
            log.warning("server refused", peer=_name(peer), reason=difference)
            await self._send(peer, m.Refused(reason=difference))
            return
        self.servers[peer] = Server(hello, heard_at=_now())
        log.info("server joined", server=_name(peer), tasks=hello.train_tasks)
        if self.evaluating is not None:
            await self.store.publish(self.evaluating, eval_tasks=self._eval_tasks())
        await self._send(peer, m.Welcome(version=await self.store.version()))

    def _difference(self, peer: bytes, hello: m.ServerHello) -> str | None:
        """What about a server doesn't fit the run, None if it all does."""
        if hello.run != self.config.run.name:
            return f"this buffer serves run {self.config.run.name!r}, the server is of run {hello.run!r}"
        if not hello.train_tasks:
            return f"env {hello.env!r} has no tasks to train on"
        others = [server for name, server in self.servers.items() if name != peer]
        for other in others:
            for name in ("env", "env_fingerprint", "train_tasks", "eval_tasks", "tokenizer_fingerprint"):
                mine, theirs = getattr(hello, name), getattr(other.hello, name)
                if mine != theirs:
                    return f"{name} is {mine!r}, but {theirs!r} on the servers that joined before"
        return None

    async def _deliver(self, peer: bytes, message: m.Deliver, blobs: list[bytes]) -> None:
        if len(blobs) != len(message.ids):
            raise FrameError(f"{len(message.ids)} groups announced, {len(blobs)} sent")
        outcomes: dict[str, str] = {}
        ready: list[DeliveredGroup] = []
        for group_id, blob in zip(message.ids, blobs, strict=True):
            try:
                group, oldest = _checked_group(group_id, blob)
            except FrameError as error:
                self.dropped_frames += 1
                log.warning("group malformed", group=group_id, reason=str(error))
                outcomes[group_id] = await self.store.fail(group_id, reason="malformed", tokens=0)
                continue
            if group.kind == m.EVAL:
                outcomes[group_id] = await self._evaluated(group, oldest, blob)
            else:
                ready.append(DeliveredGroup(group_id, oldest, action_tokens(group), blob))
        if ready:
            stored = await self.store.deliver(ready)
            outcomes.update({group.id: outcome for group, outcome in zip(ready, stored, strict=True)})
        await self._send(peer, m.Acknowledge(outcomes=outcomes))

    async def _evaluated(self, group: m.Group, version: int, blob: bytes) -> str:
        work = EvalSlice(group.id, first=group.indices[0], tasks=len(group.indices))
        score_sum = sum(trajectory.reward for trajectory in group.trajectories)
        return await self.store.evaluated(work, version=version, score_sum=score_sum, blob=blob)

    async def _learner(self, peer: bytes, message: Any) -> None:
        match message:
            case m.LearnerHello() if message.run != self.config.run.name:
                reason = f"this buffer serves run {self.config.run.name!r}, the learner is of run {message.run!r}"
                await self._send(peer, m.Refused(request=message.request, reason=reason))
                return
            case m.LearnerHello():
                self.waiting.clear()  # of the learner that was here before: its lease would be held by nobody
                back = await self.store.restart(message.step)
                log.info("learner joined", step=message.step, groups_back_to_ready=back)
            case m.Trained():
                await self.store.train(message.step)
            case m.Published():
                await self._publish(message)
            case m.Checkpointed():
                await self.store.durable(message.step)
            case m.Finish():
                expired = await self.store.finish()
                log.info("run finished", groups_expired=expired)
        await self._send(peer, await self._state(message.request))

    async def _publish(self, message: m.Published) -> None:
        if message.evaluate:
            self.evaluating = message.version
        await self.store.publish(message.version, eval_tasks=self._eval_tasks() if message.evaluate else 0)

    def _eval_tasks(self) -> int:
        """Held-out tasks to evaluate on: no more than the env has, which a server knows; 0 as long as none is here."""
        known = [server.hello.eval_tasks for server in self.servers.values()]
        return min([self.config.eval.tasks, *known]) if known else 0

    async def _state(self, request: int) -> m.State:
        counts = await self.store.counts()
        return m.State(
            request=request,
            version=await self.store.version(),
            counts=msgspec.structs.replace(counts, dropped_frames=self.dropped_frames),
            servers=[server.credits.status for server in self.servers.values() if server.credits],
            evals=await self.store.take_eval_reports(),
        )

    # --- grants -----------------------------------------------------------------------------------------------------

    async def _grant(self) -> None:
        """Leases what waiting learners can have, and issues what servers may generate."""
        await self._grant_leases()
        now = _now()
        for peer, server in list(self.servers.items()):
            if now - server.heard_at > SERVER_SILENT_S:
                del self.servers[peer]
                log.warning("server silent, forgotten", server=_name(peer), after_s=SERVER_SILENT_S)
            elif server.credits is not None:
                await self._grant_evaluation(peer, server, server.credits)
                await self._grant_tickets(peer, server.hello, server.credits)

    async def _grant_leases(self) -> None:
        still_waiting = []
        for pending in self.waiting:
            request = pending.request
            ids = await self.store.lease(
                request.step,
                consuming_version=request.consuming_version,
                count=request.count,
                max_staleness=self.config.buffer.max_staleness,
                deadline_s=self.config.buffer.lease_deadline_s,
            )
            if ids:
                await self._send(pending.peer, m.Lease(request=request.request, step=request.step, group_ids=ids))
            elif _now() >= pending.until:
                await self._send(pending.peer, m.NotReady(request=request.request))
            else:
                still_waiting.append(pending)
        self.waiting = still_waiting

    async def _grant_tickets(self, peer: bytes, hello: m.ServerHello, credits: m.Credits) -> None:
        issued = await self.store.issue(
            _name(peer),
            server_version=credits.status.version,
            credits=credits.capacity,
            max_staleness=self.config.buffer.max_staleness,
            groups_per_version=self.config.groups_per_version,
            deadline_s=self.config.buffer.ticket_deadline_s,
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
        left, granted = await self.store.evaluate(version, slices=slices, deadline_s=self.config.eval.deadline_s)
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

    async def _send(self, peer: bytes, message: m.Message) -> None:
        try:
            # Not waiting: a peer that doesn't read what it is sent must not hold up the others.
            await self.socket.send_multipart([peer, encode(message)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.servers.pop(peer, None)
            log.warning("peer is gone or doesn't read", peer=_name(peer), message=type(message).__name__)


def _checked_group(group_id: str, blob: bytes) -> tuple[m.Group, int]:
    """A delivered group and the oldest version among its action tokens.

    Raises: FrameError when it is not the group that was announced, or not what its ticket asked for.
    """
    group = decode_group(blob)
    oldest = oldest_version(group)
    if group.id != group_id or oldest is None:
        raise FrameError(f"group {group_id}: another id inside, or no action token")
    if group.kind == m.EVAL and len(group.trajectories) != len(group.indices):
        raise FrameError(f"group {group_id}: {len(group.trajectories)} answers to {len(group.indices)} tasks")
    return group, oldest


def _name(peer: bytes) -> str:
    """A peer's identity as text; any bytes may be one."""
    return peer.decode(errors="backslashreplace")


def _now() -> float:
    return asyncio.get_running_loop().time()
