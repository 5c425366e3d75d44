"""Messages of learners: reports on steps, and lease requests."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from slipstream.buffer import identity
from slipstream.buffer.handlers.fleet import Fleet
from slipstream.buffer.handlers.peers import IsConnected, MalformedCounter, Send, peer_name
from slipstream.buffer.handlers.rollout import Ingest
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import MemoryGuard
from slipstream.buffer.store.spill import Spiller
from slipstream.buffer.store.types import LeasedGroups, SpilledGroupsError, SupersededError, UnknownLearnerError
from slipstream.buffer.wire import messages as m
from slipstream.configs.runtime.errors import RefusedError
from slipstream.configs.runtime.logging import get_log

log = get_log("buffer.learner")

PROBE_AFTER_S = 3.0
"""Silence after which the learner's connection is checked: training steps may take minutes."""


class LearnerHandler:
    """Handles reports of learners; each is answered with the state of the run.

    Attributes:
        length_bias: the latest measurement, by drop reason.
    """

    def __init__(
        self,
        settings: Mapping[str, str],
        ledger: Ledger,
        fleet: Fleet,
        malformed: MalformedCounter,
        ingest: Ingest,
        file_errors: Callable[[], int],
        send: Send,
        is_connected: IsConnected,
    ) -> None:
        """Args:
        settings: must be the same on the learner.
        file_errors: number of files of groups that could not be written or read.
        """
        self._settings = settings
        self._ledger = ledger
        self._fleet = fleet
        self._malformed = malformed
        self._ingest = ingest
        self._file_errors = file_errors
        self._send = send
        self._is_connected = is_connected
        self._registered = ""
        self._peer = b""
        self._heard_at = 0.0
        self.length_bias: dict[str, float] = {}

    async def answer(self, peer: bytes, message: Any) -> None:
        """Applies a learner's report, or refuses it. Raises: ConfigError (`require_unknown_incarnation`)."""
        answer: m.Message
        try:
            await self._apply(message)
            self._heard(peer, message)
            answer = await self._state(message.request)
        except UnknownLearnerError:
            answer = m.UnknownPeer(request=message.request)
        except (RefusedError, SupersededError) as error:
            log.warning("learner refused", learner=peer_name(peer), reason=str(error))
            answer = m.Refused(request=message.request, reason=str(error))
        await self._send(peer, answer)

    async def check_connection(self) -> None:
        """Stops the issue of tickets while the run's learner is not connected.

        Groups in flight when it returns with weights of a checkpoint may become too stale (lua/restart.lua).
        """
        if not self._peer or self._peer in self._fleet.servers or _now() - self._heard_at < PROBE_AFTER_S:
            return
        away = not await self._is_connected(self._peer)
        if away and not self._fleet.paused:
            log.warning("learner is away: no tickets are issued until it returns", learner=peer_name(self._peer))
        self._fleet.paused = away

    def _heard(self, peer: bytes, message: m.Message) -> None:
        """Records that the learner is there."""
        if isinstance(message, m.LearnerHello):
            self._peer = peer
        elif isinstance(message, m.Finish):
            self._peer = b""
        if peer == self._peer:
            self._heard_at = _now()
            self._fleet.paused = False

    async def _apply(self, message: Any) -> None:
        match message:
            case m.LearnerHello():
                await self._hello(message)
            case m.Trained() | m.Published() | m.Throttle() | m.Checkpointed() | m.Finish() if (
                message.incarnation != self._registered
            ):
                # The service was restarted, perhaps with other settings: the hello must be checked again.
                raise UnknownLearnerError(self._ledger.run)
            case m.Trained():
                await self._ledger.train(message.step, learner=message.incarnation)
            case m.Published():
                await self._publish(message)
            case m.Throttle():
                await self._ledger.throttle(message.max_staleness, learner=message.incarnation)
            case m.Checkpointed():
                await self._ledger.durable(message.step, learner=message.incarnation)
            case m.StateRequest():
                await self._ingest.store()  # earlier deliveries count
            case m.Finish():
                await self._ingest.store()
                expired = await self._ledger.finish(learner=message.incarnation)
                self._fleet.learner = None
                log.info("run finished", groups_expired=expired)

    async def _hello(self, hello: m.LearnerHello) -> None:
        if hello.run != self._ledger.run:
            raise RefusedError(identity.wrong_run_error(self._ledger.run, "learner", hello.run))
        difference = identity.settings_difference(hello.settings, self._settings)
        if difference:
            if hello.incarnation != self._registered:
                identity.require_unknown_incarnation(hello.incarnation, await self._ledger.learner(), difference)
            raise RefusedError(difference)
        # Not with the earlier learner, which this one replaces.
        servers = self._fleet.server_settings()
        unlike = identity.host_difference(hello.settings, self._settings, servers)
        if unlike:
            raise RefusedError(unlike)
        mine = identity.learner_identity(hello)
        other = identity.identity_change(mine, await self._ledger.identify(mine))
        if other:
            raise RefusedError(other)
        await self._require_all_steps(hello)
        back, forgotten = await self._ledger.restart(hello.step, learner=hello.incarnation, version=hello.version)
        if back or hello.incarnation != self._registered:  # otherwise it is a repetition
            log.info("learner joined", step=hello.step, groups_back_to_ready=back)
        self._registered = hello.incarnation
        self._fleet.learner = hello
        if forgotten:
            log.error("groups of undone steps were forgotten and can't be trained on again", steps=forgotten)

    async def _require_all_steps(self, hello: m.LearnerHello) -> None:
        """Raises: RefusedError for a new learner without all steps that a checkpoint of the run contains."""
        durable = await self._ledger.durable_steps()
        if hello.undo or hello.step >= durable or hello.incarnation == await self._ledger.learner():
            return
        raise RefusedError(
            f"a checkpoint of run {hello.run!r} contains {durable} steps, this learner starts after {hello.step}: see "
            "that run.dir is the folder with that checkpoint, and mounted; to undo the later steps and train them "
            "again, start the learner with --undo-steps"
        )

    async def _publish(self, message: m.Published) -> None:
        await self._ledger.publish(message.version, evaluate=message.evaluate, learner=message.incarnation)
        if message.evaluate:  # after the call: a sweep running at the same time would restore the previous version
            self._fleet.evaluating = message.version

    async def _state(self, request: int) -> m.State:
        standing = await self._ledger.snapshot()
        servers = self._fleet.servers.values()
        return m.State(
            request=request,
            version=standing.version,
            counts=msgspec.structs.replace(
                standing.counts, dropped_frames=self._malformed.count, spill_errors=self._file_errors()
            ),
            servers=[server.credits.status for server in servers if server.credits],
            evals=await self._ledger.evaluations.reports(standing.evaluated),
            length_bias=self.length_bias,
            tasks=dict(standing.tasks),
        )


MAX_PENDING_REQUESTS = 100
"""Bound on pending lease requests: a run has one learner, and a faulty peer must not fill the memory."""


@dataclass(frozen=True)
class Pending:
    """A lease request that waits for groups."""

    peer: bytes
    request: m.LeaseRequest
    until: float


class LeaseQueue:
    """Pending lease requests: the latest of each peer."""

    def __init__(self, ledger: Ledger, spiller: Spiller, memory: MemoryGuard, send: Send) -> None:
        self._ledger = ledger
        self._spiller = spiller
        self._memory = memory
        self._send = send
        self._waiting: dict[bytes, Pending] = {}

    def __bool__(self) -> bool:
        """True if a request is pending."""
        return bool(self._waiting)

    @property
    def until(self) -> float | None:
        """The earliest deadline, by the event loop's clock; None without a pending request."""
        return min((pending.until for pending in self._waiting.values()), default=None)

    def add(self, peer: bytes, request: m.LeaseRequest) -> None:
        """Adds a request; a repeated one keeps its deadline."""
        if peer in self._waiting and self._waiting[peer].request.request == request.request:
            return
        self._waiting.pop(peer, None)
        while len(self._waiting) >= MAX_PENDING_REQUESTS:
            del self._waiting[next(iter(self._waiting))]
        self._waiting[peer] = Pending(peer, request, _now() + request.wait_s)

    async def grant(self) -> None:
        """Answers requests for which there are enough groups, and those past their deadline."""
        for pending in list(self._waiting.values()):
            answer = await self._answer(pending)
            if answer is not None:
                if self._waiting.get(pending.peer) is pending:
                    del self._waiting[pending.peer]
                await self._send(pending.peer, answer)

    async def _answer(self, pending: Pending) -> m.Lease | m.NotReady | m.Refused | None:
        request, lease = pending.request, None
        try:
            lease = await self._lease(request)
        except SupersededError as error:
            return m.Refused(request=request.request, reason=str(error))
        except UnknownLearnerError:
            pass  # the learner's other connection gets UnknownPeer at its next report
        if lease is not None:
            return m.Lease(
                request=request.request,
                group_ids=lease.ids,
                importance_weights=lease.importance_weights,
                oldest_version=lease.oldest_version,
                staleness=lease.staleness,
            )
        return m.NotReady(request=request.request) if _now() >= pending.until else None

    async def _lease(self, request: m.LeaseRequest) -> LeasedGroups | None:
        while True:
            try:
                return await self._ledger.lease(
                    request.step,
                    consuming_version=request.consuming_version,
                    count=request.count,
                    learner=request.incarnation,
                )
            except SpilledGroupsError as error:  # those of undone steps
                if not await self._memory.attempt(self._spiller.restore(error.ids)):
                    return None


def _now() -> float:
    return asyncio.get_running_loop().time()
