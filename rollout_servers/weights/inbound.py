"""Inbound versions: through host memory, or directly into the engine where that is possible."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from slipstream.buffer.wire.weights import protocol as w
from slipstream.configs.runtime.threads import run_in_thread
from slipstream.configs.schema.weights import TRANSPORTS, SecurityConfig
from slipstream.rollout_servers.engines.base import DirectSource, Engine
from slipstream.rollout_servers.engines.staging import Staging, TransferFailed
from slipstream.rollout_servers.weights.receivers import Receiver, build_receiver, build_receivers

GRACE_S = 5.0
"""A receiver's own deadline comes first: its error says more."""


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
    """Receivers, the memory that they fill, and the engine that installs it."""

    def __init__(self, run: str, security: SecurityConfig, engine: Restartable) -> None:
        self._run = run
        self._security = security
        self._engine = engine
        self._receivers: dict[str, Receiver] = build_receivers(security)
        self._staging = self._new_staging()
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

    @property
    def staged(self) -> int:
        """The version whose bytes lie in host memory; -1 for none."""
        return self._staging.version

    async def enter(self, form: w.Form) -> None:
        """Enters a transfer group. Raises: TransferFailed, UpdateFailed, EngineError."""
        self._epoch = None
        if self.stops_generation(form.transport):
            await self._engine.join(form)
        else:
            await self._blocking(form.transport, form.deadline_s, lambda receiver: receiver.enter(form))
        self._epoch, self._entered = form.epoch, self._engine.incarnation

    def check(self, announce: w.Announce) -> None:
        """Raises: TransferFailed when a version can't come this way."""
        if announce.transport not in self.transports:
            raise TransferFailed(f"transport {announce.transport} is not among {', '.join(self.transports)}")
        if announce.epoch is not None and announce.epoch != self._epoch:
            raise TransferFailed(f"in transfer group {self._epoch}, not in {announce.epoch}")
        if announce.transport not in self._receivers and self._engine.incarnation != self._entered:
            raise TransferFailed(f"the engine that entered transfer group {self._epoch} died")

    def stops_generation(self, transport: str) -> bool:
        """True if generation stands still from the first byte of a version on, not only while it is applied."""
        direct = self._engine.direct
        return direct is not None and direct.name == transport

    @property
    def holds_half(self) -> bool:
        """True if a version is on its way straight into the engine, which can't be taken back."""
        return self._half is not None

    async def receive(self, announce: w.Announce) -> None:
        """Returns when all bytes are there. Raises: TransferFailed, UpdateFailed, SegmentError, EngineError."""
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
            staging = self._staging
            await self._blocking(
                announce.transport, announce.deadline_s, lambda receiver: receiver.receive(announce, staging)
            )

    async def install(self, announce: w.Announce) -> float:
        """Makes the version the one that generates; seconds of stall. Raises: UpdateFailed, EngineError."""
        manifest, half = announce.manifest, self._half
        if not self.stops_generation(announce.transport):
            return await self._engine.install(manifest.version, manifest, self._staging)
        if half is None:
            raise TransferFailed(f"version {manifest.version} was not received")
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
        self._staging.abandon()

    async def _blocking(self, transport: str, deadline_s: float, call: Callable[[Receiver], None]) -> None:
        """Runs a receiver's call in a thread; one that is left behind keeps its memory to itself."""
        receiver = self._receivers.get(transport)
        if receiver is None:
            raise TransferFailed(f"transport {transport} is not among {', '.join(self.transports)}")
        calling = run_in_thread(call, receiver)
        try:
            async with asyncio.timeout(deadline_s + GRACE_S):
                await asyncio.shield(calling)
        except (TimeoutError, asyncio.CancelledError) as ended:
            # The thread may go on writing for a while: into memory that is nobody's any more.
            left_behind, self._staging = self._staging, self._new_staging()

            def ends(late: asyncio.Future[None]) -> None:
                left_behind.abandon()
                if not late.cancelled():
                    late.exception()  # nobody waits for it any more, but asyncio wants it to be looked at

            calling.add_done_callback(ends)
            run_in_thread(receiver.close)  # it may wait for the end of a group
            self._receivers[transport] = build_receiver(transport, self._security)
            if isinstance(ended, TimeoutError):
                raise TransferFailed(f"{transport} did not return within {deadline_s:g} s") from None
            raise

    def _new_staging(self) -> Staging:
        return Staging(self._run, shared=self._engine.shares_memory)
