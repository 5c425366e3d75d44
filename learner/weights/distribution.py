"""Distribution of the latest version: members fetch one by one, or a broadcast reaches all of them in step.

Every wait has a deadline. A version whose broadcast broke off, or that a member missed, is fetched instead, so that a
member at fault delays only itself. The next version is broadcast again, by a new group without the members at fault.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext, suppress
from typing import Any

from slipstream.buffer.wire.weights import protocol as w
from slipstream.buffer.wire.weights.fabric import TransferError
from slipstream.buffer.wire.weights.layout import host_identity
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.threads import run_in_thread
from slipstream.configs.schema.weights import TRANSPORTS, WeightsConfig
from slipstream.learner.weights.members import (
    Absent,
    Failing,
    FetchQueue,
    Member,
    Roster,
    Rpc,
    SyncMetrics,
    choose_transport,
)
from slipstream.learner.weights.process_group import ProcessGroup, attribute_fault, record_success
from slipstream.learner.weights.publication import Publication
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports import Transports

log = get_log("learner.weights")

HOLDER_CHECK_S = 5.0
"""Time between two looks at members that hold a version."""
SILENT_AT_REST_S = 5.0
"""An idle member without a heartbeat for so long is dead, frozen or disconnected."""
SECOND_LOOK_S = 1.0
AVOIDED_S = 600.0
"""Time without a transport through which a member could not fetch."""
OVERTAKEN_OFTEN = 3
"""Superseded fetches in a row between two warnings."""


class Distribution:
    """The latest version, and the tasks that deliver it to the members."""

    def __init__(
        self,
        config: WeightsConfig,
        transports: Transports,
        roster: Roster,
        rpc: Rpc,
        metrics: SyncMetrics,
        *,
        gpu: str = "",
    ) -> None:
        """`gpu`: identity of the learner's, if it has one."""
        self._roster = roster
        self._rpc = rpc
        self._metrics = metrics
        self._order = transports.order
        self._fetched = transports.fetched
        broadcast = transports.broadcast
        self._group = None if broadcast is None else ProcessGroup(config, broadcast, rpc)
        self._host = host_identity()
        self._device = gpu or self._host
        self._latest: Publication | None = None
        self._under_way: list[Publication] = []
        self._reclaiming: Future[None] | None = None
        self._prepared_ahead: Publication | None = None
        self._busy: set[Member] = set()
        self._changed = asyncio.Event()
        if self._group is not None:
            self._group.changed = self._changed
        self._queue = FetchQueue(deadline_s=rpc.deadline_s)
        self._preparing = {name: asyncio.Lock() for name in self._fetched}
        self._prepared: dict[str, int] = {}
        self._turn: AbstractAsyncContextManager[Any] = asyncio.Semaphore(1) if config.rolling else nullcontext()

    def withdraw(self, transport: str) -> None:
        """Sends nothing through this transport any more."""
        self._order = [name for name in self._order if name != transport]

    def offer(self, publication: Publication) -> None:
        """Makes a version the latest."""
        publication.members = list(self._roster)
        publication.before, self._latest = self._latest, publication
        self._queue.offer(publication.snapshot.data.numel())
        self._under_way.append(publication)
        self.changed()

    def reclaim(self, reclaimed: "Future[None]") -> None:
        """Sets the future once no transfer reads a version before the latest one."""
        self._reclaiming = reclaimed
        self.changed()

    def changed(self) -> None:
        """Wakes the distribution: a member joined, left, was evicted, or finished a step."""
        self._changed.set()

    def _account(self) -> None:
        """Updates metrics and publications; once for all changes of an iteration, as it visits all members."""
        self._metrics.members, self._metrics.evictions = len(self._roster), self._roster.evictions
        if self._group is not None:
            self._metrics.unreached = sum(member.record.breaks > 0 for member in self._roster)
        for publication in self._under_way:
            if not publication.done.done() and publication.settled():
                self._metrics.published_s.append(publication.age_s)
                publication.done.set_result(None)
        self._under_way = [
            publication for publication in self._under_way if publication.readers or not publication.done.done()
        ]
        older = [publication for publication in self._under_way if publication is not self._latest]
        if self._latest is not None and self._latest.before is not None:
            older.append(
                self._latest.before
            )  # no longer under way, but the base of a difference that is being prepared
        if self._reclaiming is not None and not any(publication.readers for publication in older):
            self._release_older()
            self._reclaiming.set_result(None)
            self._reclaiming = None

    def _release_older(self) -> None:
        latest = self._latest
        if latest is not None and latest.before is not None:
            for transport in self._fetched.values():
                transport.release(latest.before.version)
            latest.before = None

    async def run(self) -> None:
        """Serves until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._wait_for_change()
                if self._latest is not None:
                    self._prepare_ahead(self._latest, tasks)
                    self._distribute(self._latest, tasks)
                self._account()  # after these, which read versions that would be reclaimed

    async def _wait_for_change(self) -> None:
        """Waits for a change; not for long while members hold a version, because one that dies then reports nothing."""
        with suppress(TimeoutError):
            async with asyncio.timeout(HOLDER_CHECK_S if any(member.join.holding for member in self._roster) else None):
                await self._changed.wait()
        self._changed.clear()

    def _prepare_ahead(self, latest: Publication, tasks: asyncio.TaskGroup) -> None:
        """Prepares a new version for members that will fetch a difference: later, the version before is overwritten."""
        if latest is self._prepared_ahead:
            return
        self._prepared_ahead = latest
        chosen = {self._choose(member, late=True) for member in self._roster}
        for name, transport in self._fetched.items():
            if transport.chained and name in chosen:
                self._start(tasks, [], self._prepare_difference(latest, name, latest.read_with_base()))

    def _distribute(self, latest: Publication, tasks: asyncio.TaskGroup) -> None:
        """Starts transfers to the members that are behind."""
        group, version = self._group, latest.version
        available = [member for member in self._roster if member not in self._busy and not member.holding]
        behind = [member for member in available if member.version != version]
        together: list[Member] = []
        if group is not None and version >= group.next_version:
            together = group.next_members(self._broadcast_to(behind), self._broadcast_to(self._busy), version)
        for member in behind:
            if member in together:
                continue
            name = self._choose(member, late=True)
            if name is not None and TRANSPORTS[name].queued:
                self._start(tasks, [member], self._deliver_in_turn(member, name))
            else:  # `read()` here: until the task starts, the snapshot could be overwritten
                self._start(tasks, [member], self._deliver(member, latest, name, latest.read()))
        holding = self._broadcast_to(member for member in self._roster if member.holding)
        if together and group is not None and not group.must_wait(version, busy=self._busy, holding=holding):
            group.begin(version, together)
            self._start(tasks, together, self._broadcast(group, together, latest, latest.read()))

    def _broadcast_to(self, members: Iterable[Member]) -> list[Member]:
        """Those of the members that have a broadcast as their preferred transport."""
        chosen = [(member, self._choose(member, late=False)) for member in members]
        return [member for member, name in chosen if name is not None and TRANSPORTS[name].broadcast]

    def _choose(self, member: Member, *, late: bool) -> str | None:
        def choose() -> str | None:
            return choose_transport(member, self._order, host=self._host, device=self._device, late=late)

        name = choose()
        if name is None and member.record.avoided:
            member.record.avoided.clear()  # no other transport is left
            name = choose()
        return name

    def _start(self, tasks: asyncio.TaskGroup, members: Sequence[Member], work: Coroutine[Any, Any, None]) -> None:
        self._busy.update(members)
        tasks.create_task(self._guarded(members, work))

    async def _guarded(self, members: Sequence[Member], work: Coroutine[Any, Any, None]) -> None:
        try:
            await self._tolerate(work)
        finally:
            self._busy.difference_update(members)
            self.changed()

    @staticmethod
    async def _tolerate(work: Coroutine[Any, Any, None]) -> None:
        with suppress(Absent, TransferError):  # logged where raised; the other members are served
            await work

    async def _deliver(self, member: Member, latest: Publication, name: str | None, reading: ExitStack) -> None:
        """Lets one member fetch a version and apply it."""
        with reading:
            transfer = await self._fetch(member, latest, name, reading)
        self.changed()
        await self._apply(member, transfer, latest.version, self._turn)

    async def _deliver_in_turn(self, member: Member, name: str) -> None:
        """Like `_deliver`, with the version that is the latest when the fetch is admitted."""
        try:
            granted = self._queue.enter(member)
            if not granted.done():
                await self._rpc.send(member, w.Queued(ahead=self._queue.waiting - 1))
            await granted
            latest = self._latest
            assert latest is not None, "members fetch only after a publication"
            with latest.read() as reading:
                transfer = await self._fetch(member, latest, name, reading)
        finally:
            self._queue.leave(member)
        self.changed()
        await self._apply(member, transfer, latest.version, self._turn)

    async def _fetch(self, member: Member, latest: Publication, name: str | None, reading: ExitStack) -> int:
        """Returns the transfer's number once the member has all bytes. Raises: Absent, TransferError."""
        await self._check_heartbeat(member)
        if name is None:
            offered, sent = ", ".join(member.join.transports), ", ".join(self._order)
            raise await self._rpc.evict(member, f"receives through {offered}, but the learner sends through {sent}")
        snapshot = await latest.for_transport(name)
        source = await self._source(member, latest, name)
        if not TRANSPORTS[name].in_place:
            reading.close()
            self.changed()
        transfer = self._rpc.begin([member])
        announce = w.Announce(
            transfer=transfer,
            transport=name,
            manifest=snapshot.manifest,
            deadline_s=self._rpc.deadline_s,
            source=source,
        )
        await self._rpc.send(member, announce)
        await self._await_bytes(member, latest, name, source.place)
        member.record.overtaken = 0
        member.staged, member.queued_at = latest.version, None
        return transfer

    async def _await_bytes(self, member: Member, latest: Publication, name: str, place: str) -> None:
        """Returns once the member has all bytes of an announced fetch. Raises: Absent, TransferError."""
        transport = self._fetched[name]
        await self._rpc.expect(member, w.Ready, state="getting ready", version=latest.version)
        began, sent_bytes = time.monotonic(), transport.sent_bytes
        try:
            await self._rpc.expect(
                member,
                w.Loaded,
                state=f"receiving through {name} from {place}",
                version=latest.version,
                superseded=lambda: latest is not self._latest,
            )
        except Failing:
            self._avoid(member, name)
            raise
        except TransferError:
            self._overtaken(member, latest.version)
            raise
        finally:
            self._queue.measure(transport.sent_bytes - sent_bytes, time.monotonic() - began)

    @staticmethod
    def _avoid(member: Member, name: str) -> None:
        """Uses other transports for a while."""
        member.record.avoided[name] = time.monotonic() + AVOIDED_S

    @staticmethod
    def _overtaken(member: Member, version: int) -> None:
        member.record.overtaken += 1
        if member.record.overtaken % OVERTAKEN_OFTEN == 0:
            log.warning(
                "a rollout server fetches so slowly that each version is superseded first",
                server=member.name,
                versions=member.record.overtaken,
                last=version,
                remedy="a larger weights.publish_every_steps, or another transport",
            )

    async def _source(self, member: Member, latest: Publication, name: str) -> w.Source:
        """The source from which the member fetches the version.

        Raises: Absent when it can't be prepared; TransferError when a newer one is, which the member gets next.
        """
        with latest.read_with_base():
            snapshot = await latest.for_transport(name)
            async with self._preparing[name]:
                if latest.version < self._prepared.get(name, -1):  # it would break the chain of differences
                    raise TransferError(f"version {latest.version} was superseded")
                try:
                    await self._prepare(snapshot, name)
                except TransferError as error:
                    self._avoid(member, name)
                    reason = f"the version can't be sent through {name}: {error}"
                    raise await self._rpc.evict(member, reason, at_fault=False) from None
                return self._fetched[name].source(snapshot, member.staged)

    async def _prepare_difference(self, latest: Publication, name: str, reading: ExitStack) -> None:
        """Prepares a version that no member fetches yet. Raises: TransferError."""
        with reading:
            snapshot = await latest.on_host()
            async with self._preparing[name]:
                if latest.version > self._prepared.get(name, -1):
                    await self._prepare(snapshot, name)

    async def _prepare(self, snapshot: Snapshot, name: str) -> None:
        """Raises: TransferError.

        A thread that hangs, as on a lost file system, can't be cancelled, and reads the learner's memory. So training
        waits for it, which is logged. It does not keep the process from exiting.
        """
        transport, version = self._fetched[name], snapshot.manifest.version
        if TRANSPORTS[name].queued and self._prepared.get(name) == version:
            transport.prepare(snapshot)  # does nothing now, so it needs no thread
            return
        began = time.monotonic()
        preparing = run_in_thread(transport.prepare, snapshot)
        while not (await asyncio.wait({preparing}, timeout=self._rpc.deadline_s))[0]:
            log.error(
                "a version is still not ready to be fetched: the next snapshot, and training, wait for it",
                transport=name,
                version=version,
                already_s=round(time.monotonic() - began, 1),
            )
        preparing.result()
        self._prepared[name] = version

    async def _broadcast(
        self, group: ProcessGroup, members: Sequence[Member], latest: Publication, reading: ExitStack
    ) -> None:
        """Broadcasts a version to members, which then apply it."""
        with reading:
            present = await self._responsive(members)
            if not present:
                return
            snapshot = latest.snapshot if group.on_device else await latest.on_host()
            try:
                transfer = await group.send(snapshot, present)
            except TransferError as error:
                if await self._all_present(present):  # else the absent one is the cause
                    attribute_fault(present, group.done, group.next_version, str(error))
                raise
        record_success(present)
        self.changed()
        async with asyncio.TaskGroup() as applying:
            # On device all engines are paused already: one after another would only prolong the pause.
            turn = nullcontext() if group.on_device else self._turn
            for member in present:
                applying.create_task(self._tolerate(self._apply(member, transfer, latest.version, turn)))

    async def _all_present(self, members: Sequence[Member]) -> bool:
        """True if all are present; dead and silent ones are evicted."""
        for member in members:
            with suppress(Absent):
                await self._rpc.send(member, w.Ping())
        return len(await self._responsive(members)) == len(members)

    async def _responsive(self, members: Sequence[Member]) -> list[Member]:
        """The members that are not silent; the others are evicted."""
        async with asyncio.TaskGroup() as looks:  # each may take SECOND_LOOK_S
            for member in members:
                looks.create_task(self._tolerate(self._check_heartbeat(member)))
        return [member for member in members if not member.gone.is_set()]

    async def _check_heartbeat(self, member: Member) -> None:
        """Evicts a member that is silent. Raises: Absent."""
        if member.silent_s > SILENT_AT_REST_S:
            # After a pause of this process, heartbeats may be waiting in the socket.
            await asyncio.sleep(SECOND_LOOK_S)
        if member.silent_s > SILENT_AT_REST_S:
            raise await self._rpc.evict(member, f"silent for {member.silent_s:.0f} s")

    async def _apply(self, member: Member, transfer: int, version: int, turn: AbstractAsyncContextManager[Any]) -> None:
        async with turn:
            await self._rpc.send(member, w.Apply(transfer=transfer, version=version))
            applied = await self._rpc.expect(member, w.Applied, state="applying", version=version)
        self._roster.applied(member, version)
        self._metrics.stalls_s.append(applied.stall_s)
        if applied.verified == w.BY_PROBE:
            self._metrics.deviations.append(applied.deviation)
        self.changed()
