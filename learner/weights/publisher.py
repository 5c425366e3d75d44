"""Publishes versions to the rollout servers, in a thread of its own: training never waits for a transfer to finish.

Only the next publication waits for the last one, and that wait has a deadline like every other.
"""

import asyncio
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import uvloop
import zmq.asyncio

from slipstream.buffer.wire import weights as w
from slipstream.buffer.wire.codec import FrameError, decode, encode
from slipstream.buffer.wire.curve import service_keys
from slipstream.buffer.wire.messages import Message
from slipstream.buffer.wire.sockets import bind_router
from slipstream.configs import RunConfig
from slipstream.configs.errors import ConfigError
from slipstream.configs.logs import get_log
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transport import WeightTransport

log = get_log("learner.weights")

MAX_CONTROL_BYTES = 1 << 20
SILENT_S = 5.0
SILENT_AT_WORK_S = 15.0
"""A member that puts weights into its engine may be too busy for its heartbeat for a while."""
CHECK_S = 1.0


@dataclass
class Member:
    """A rollout server as the learner sees it."""

    name: str
    workers: int
    version: int
    heard_at: float
    epoch: int | None = None
    """The transfer group that it was told to enter; None until the next one is formed."""
    state: str = "joined"
    due: tuple[type[Message], int] | None = None
    """The answer that is waited for: its type and version."""
    answer: asyncio.Future[Any] | None = None


@dataclass
class SyncFigures:
    """How publications went; read by the training loop."""

    published_s: list[float] = field(default_factory=list)
    """From the call of `publish` to the last server's `Applied`."""
    stalls_s: list[float] = field(default_factory=list)
    """How long each server's generation stood still."""
    evictions: int = 0


@dataclass
class Publication:
    """A version on its way."""

    snapshot: Snapshot
    since: float
    begun: Future[None] = field(default_factory=Future)
    """Done when no transfer reads an older snapshot any more."""
    done: Future[None] = field(default_factory=Future)


class WeightPublisher:
    """The control plane on the learner's rank 0, and the transport that it drives."""

    def __init__(self, config: RunConfig, transport: WeightTransport) -> None:
        self._config = config
        self._transport = transport
        self._members: dict[bytes, Member] = {}
        self._epoch = 0
        self._latest: Snapshot | None = None
        self.figures = SyncFigures()
        self._started: Future[None] = Future()
        self._under_way: Publication | None = None
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()), name="weights", daemon=True)
        self._thread.start()
        self._started.result()

    @property
    def on_device(self) -> bool:
        """Whether snapshots must lie in the accelerator's memory."""
        return self._transport.name == "nccl"

    def publish(self, snapshot: Snapshot) -> None:
        """Hands a version over; waits for the one before it, not for this one.

        It also waits while a late joiner is being sent an older version, whose buffer the next snapshot will take.

        Raises: what the thread died of.
        """
        self.wait()
        self._under_way = Publication(snapshot, time.perf_counter())
        if self._death is not None:
            raise self._death
        self._loop.call_soon_threadsafe(self._work.put_nowait, self._under_way)
        self._under_way.begun.result()

    def wait(self) -> None:
        """Waits until the publication under way is done: every server has applied it or was evicted."""
        if self._under_way is not None:
            self._under_way.done.result()

    def close(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    # --- in the thread ----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        self._task = task
        context = zmq.asyncio.Context()
        try:
            self._socket = self._bind(context)
            self._work: asyncio.Queue[Publication | None] = asyncio.Queue()
            self._started.set_result(None)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen())
                tasks.create_task(self._transfer())
        except asyncio.CancelledError:
            pass  # close()
        except BaseException as error:
            self._death = error
            waited_for = [self._started]
            if self._under_way is not None:
                waited_for += [self._under_way.begun, self._under_way.done]
            unfinished = [future for future in waited_for if not future.done()]
            for future in unfinished:
                future.set_exception(error)
            if not unfinished:
                raise
        finally:
            context.destroy(linger=0)

    def _bind(self, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
        address = f"tcp://{self._config.weights.bind}:{self._config.weights.control_port}"
        keys = service_keys(self._config.security)
        try:
            return bind_router(context, address, max_message_bytes=MAX_CONTROL_BYTES, keys=keys)
        except ConfigError as error:
            raise ConfigError(f"{error} (weights.bind, weights.control_port)") from None

    async def _listen(self) -> None:
        while True:
            peer, frame = (await self._socket.recv_multipart())[:2]
            try:
                message = decode(frame, w.FromServer)
            except FrameError as error:
                log.warning("frame dropped", peer=peer.hex(), reason=str(error))
                continue
            if isinstance(message, w.Join):
                self._heard(peer, message)
                continue
            member = self._members.get(peer)
            if member is None or member.answer is None or member.answer.done():
                continue
            # An answer to what was asked earlier, perhaps by the learner before this one, is not the one that is due.
            if isinstance(message, w.Failed) or (type(message), message.version) == member.due:
                member.answer.set_result(message)

    def _heard(self, peer: bytes, join: w.Join) -> None:
        if join.run != self._config.run.name:
            return
        member = self._members.get(peer)
        if member is None:
            self._members[peer] = Member(join.server, join.workers, join.version, time.monotonic())
            log.info("rollout server joined", server=join.server, version=join.version)
            self._work.put_nowait(None)
        else:
            member.heard_at = time.monotonic()

    async def _transfer(self) -> None:
        """Brings every member to the latest version, whenever that or the membership changes."""
        while True:
            work = await self._work.get()
            if work is not None:
                self._latest = work.snapshot
                work.begun.set_result(None)
            await self._bring_up_to_date()
            if work is not None:
                self.figures.published_s.append(time.perf_counter() - work.since)
                work.done.set_result(None)

    async def _bring_up_to_date(self) -> None:
        while self._latest is not None:
            self._drop_silent()
            snapshot = self._latest
            behind = [m for m in self._members.values() if m.version != snapshot.manifest.version]
            if not behind:
                return
            if any(member.epoch != self._epoch for member in self._members.values()) and not await self._form():
                continue
            await self._send(snapshot)

    async def _form(self) -> bool:
        """Forms a new transfer group of all members; False if that failed and someone was evicted."""
        self._epoch += 1
        rank = 1
        world = 1 + sum(member.workers for member in self._members.values())
        for peer, member in list(self._members.items()):
            member.epoch, member.state = self._epoch, "entering the transfer group"
            form = w.Form(
                epoch=self._epoch,
                transport=self._transport.name,
                host=self._config.weights.host,
                port=self._config.weights.store_port,
                rank=rank,
                world=world,
                deadline_s=self._config.weights.deadline_s,
            )
            rank += member.workers
            if not await self._tell(peer, form):
                self._epoch += 1  # the others enter this group in vain; the next one has another number
                return False
        try:
            await asyncio.to_thread(self._transport.form, self._epoch, world)
        except RuntimeError as error:
            self._blame("entering the transfer group", str(error))
            return False
        log.info("transfer group formed", epoch=self._epoch, members=[m.name for m in self._group().values()])
        return True

    def _group(self) -> dict[bytes, Member]:
        """The members of the present transfer group. Who has joined since it was formed must not hold it up."""
        return {peer: member for peer, member in self._members.items() if member.epoch == self._epoch}

    async def _send(self, snapshot: Snapshot) -> None:
        version = snapshot.manifest.version
        group = self._group()
        announce = w.Announce(epoch=self._epoch, manifest=snapshot.manifest)
        ready = await self._ask_all(group, announce, (w.Ready, version), "getting ready")
        if len(ready) < len(group):
            return
        try:
            await asyncio.to_thread(self._transport.send, snapshot)
        except RuntimeError as error:
            self._blame("receiving", str(error))
            return
        sent = w.Sent(version=version)
        for member, applied in await self._ask_all(group, sent, (w.Applied, version), "applying"):
            member.version = version
            self.figures.stalls_s.append(applied.stall_s)

    async def _ask_all(
        self, asked: dict[bytes, Member], question: Message, due: tuple[type[Message], int], state: str
    ) -> list[tuple[Member, Any]]:
        """The answers; whoever does not give the one that is `due` within the deadline is evicted."""
        for member in asked.values():
            member.state, member.due, member.answer = state, due, self._loop.create_future()
        for peer in asked:
            await self._tell(peer, question)
        deadline = self._loop.time() + self._config.weights.deadline_s
        answers = []
        for peer, member in asked.items():
            if peer not in self._members:
                continue
            assert member.answer is not None, "set above"
            absence = await self._await_answer(member, member.answer, deadline)
            if absence is not None:
                self._evict(peer, f"{absence} while {state}")
                continue
            reply = member.answer.result()
            if isinstance(reply, w.Failed):
                self._evict(peer, f"while {state}: {reply.stage}: {reply.detail}")
            else:
                answers.append((member, reply))
        return answers

    async def _await_answer(self, member: Member, answer: "asyncio.Future[Any]", deadline: float) -> str | None:
        """Returns once the answer is there, with None; or why it is not worth waiting for any longer."""
        while True:
            silent = self._silent_s(member) > SILENT_AT_WORK_S
            await asyncio.wait({answer}, timeout=max(0.0, min(CHECK_S, deadline - self._loop.time())))
            if answer.done():
                return None
            # Twice: after a pause of this very process nobody has been heard for long, but their words are waiting.
            if silent and self._silent_s(member) > SILENT_AT_WORK_S:
                return f"silent for {self._silent_s(member):.0f} s"
            if self._loop.time() >= deadline:
                return f"no answer for {self._config.weights.deadline_s:.0f} s"

    async def _tell(self, peer: bytes, message: Message) -> bool:
        try:
            await self._socket.send_multipart([peer, encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._evict(peer, f"connection gone, {type(message).__name__} could not be sent")
            return False
        return True

    def _blame(self, state: str, detail: str) -> None:
        """A collective failed. The silent are evicted; if nobody is silent, all are: one of them is at fault.

        Whoever lives joins again with its next heartbeat.
        """
        log.warning("transfer failed", state=state, members=[m.name for m in self._members.values()], detail=detail)
        before = len(self._members)
        self._drop_silent()
        if len(self._members) == before:
            for peer in list(self._members):
                self._evict(peer, f"a member failed while {state}")

    def _drop_silent(self) -> None:
        for peer, member in list(self._members.items()):
            if self._silent_s(member) > SILENT_S:
                self._evict(peer, f"silent for {self._silent_s(member):.0f} s, last {member.state}")

    @staticmethod
    def _silent_s(member: Member) -> float:
        return time.monotonic() - member.heard_at

    def _evict(self, peer: bytes, reason: str) -> None:
        """Takes a server out; it may join again with its next heartbeat."""
        member = self._members.pop(peer, None)
        if member is None:
            return
        self.figures.evictions += 1
        if member.epoch is not None:
            for other in self._members.values():
                other.epoch = None
        log.warning("rollout server evicted", server=member.name, reason=reason)
