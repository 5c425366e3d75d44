"""Distribution of the latest version: members fetch one by one, or a broadcast reaches all of them in step.

Every wait has a deadline. A version whose broadcast broke off, or that a member missed, is fetched instead, so that a
member at fault delays only itself. The next version is broadcast again, by a new group without the members at fault.
"""

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from slipstream.buffer.wire.weights import protocol as w
from slipstream.buffer.wire.weights.shm import host_identity
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.threads import run_in_thread
from slipstream.learner.weights.members import (
    BROADCAST,
    Absent,
    Failing,
    Member,
    Roster,
    admitted,
    attribute_fault,
    choose_transport,
    record_success,
)
from slipstream.learner.weights.process_group import ProcessGroup
from slipstream.learner.weights.rpc import Rpc
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports.base import Fetched, TransferError

log = get_log("learner.weights")

KEPT = 10_000
"""Figures of each kind, or they would grow as long as the run goes on."""


@dataclass
class SyncFigures:
    """Figures of the latest publications; read by the training loop."""

    published_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """From the call of `publish` until the last server that was there had applied the version, or was evicted."""
    stalls_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """How long each server's generation stood still."""
    deviations: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """How far each probe's log-probs were off by which a server made sure that its engine holds the version."""
    members: int = 0
    """Rollout servers that are members now."""
    evictions: int = 0
    unreached: int = 0
    """Servers among the members that broadcasts broke off at, so that they fetch instead."""


@dataclass(eq=False)
class Publication:
    """One version, its recipients, and the transfers that still read the learner's copy.

    Attributes:
        members: who was there when it was published and has not applied it yet.
        free: done when this is the latest version and no transfer reads an older one's memory any more.
        done: done when nobody is left in `members`.
    """

    snapshot: Snapshot
    members: list[Member] = field(default_factory=list)
    since: float = field(default_factory=time.perf_counter)
    readers: int = 0
    _sealed: Snapshot | None = None
    _sealing: asyncio.Lock = field(default_factory=asyncio.Lock)
    free: Future[None] = field(default_factory=Future)
    done: Future[None] = field(default_factory=Future)

    @property
    def version(self) -> int:
        """The version."""
        return self.snapshot.manifest.version

    def read(self) -> ExitStack:
        """Keeps the learner from overwriting the snapshot, from now on until the stack is closed."""

        def done() -> None:
            self.readers -= 1

        self.readers += 1
        reading = ExitStack()
        reading.callback(done)
        return reading

    @property
    def age_s(self) -> float:
        """Time since the call of `publish`."""
        return time.perf_counter() - self.since

    async def on_host(self) -> Snapshot:
        """The snapshot in host memory, with its checksums; made once, in a thread."""
        async with self._sealing:
            if self._sealed is None:
                self._sealed = await asyncio.to_thread(self.snapshot.sealed)
            return self._sealed

    def settled(self) -> bool:
        """Whether everyone has applied it or a later one, or is gone."""
        self.members = [m for m in self.members if not m.gone.is_set() and m.version < self.version]
        return not self.members


IN_PLACE = ("shm",)
"""Transports by which members read the learner's own copy of a version."""
SILENT_AT_REST_S = 5.0
"""A member that has nothing to do and says nothing for so long is dead, frozen or cut off."""
SECOND_LOOK_S = 1.0
AVOIDED_S = 600.0
"""For so long a member that could not fetch through a transport does so through another one."""
OVERTAKEN_OFTEN = 3
"""Versions in a row; it is said each time that they are so many more."""


class Distribution:
    """The latest version, and the tasks that deliver it to the members."""

    def __init__(
        self,
        roster: Roster,
        rpc: Rpc,
        figures: SyncFigures,
        *,
        order: Sequence[str],
        fetched: Mapping[str, Fetched],
        group: ProcessGroup | None,
        rolling: bool,
    ) -> None:
        """Args:
        order: names of the transports, the preferred one first.
        fetched: those of them that members fetch from.
        group: the transfer group of the one that broadcasts, if there is one.
        rolling: members apply a version one after another.
        """
        self._roster = roster
        self._rpc = rpc
        self._figures = figures
        self._order = order
        self._fetched = fetched
        self._group = group
        self._host = host_identity()
        self._latest: Publication | None = None
        self._under_way: list[Publication] = []
        self._busy: set[Member] = set()
        self._in_group: list[Member] = []
        self._changed = asyncio.Event()
        self._patience: asyncio.TimerHandle | None = None
        self._patience_ended = False
        self._preparing = {name: asyncio.Lock() for name in fetched}
        self._prepared: dict[str, int] = {}
        self._turn: AbstractAsyncContextManager[Any] = asyncio.Semaphore(1) if rolling else nullcontext()

    def withdraw(self, transport: str) -> None:
        """Sends nothing through this transport any more."""
        self._order = [name for name in self._order if name != transport]

    def offer(self, publication: Publication) -> None:
        """Makes a version the latest."""
        publication.members = list(self._roster)
        self._latest = publication
        self._under_way.append(publication)
        self.changed()

    def changed(self) -> None:
        """Wakes the distribution: a member joined, left, was evicted, or finished a step."""
        self._figures.members, self._figures.evictions = len(self._roster), self._roster.evictions
        self._figures.unreached = sum(member.record.breaks > 0 for member in self._roster)
        for publication in self._under_way:
            if not publication.done.done() and publication.settled():
                self._figures.published_s.append(publication.age_s)
                publication.done.set_result(None)
        self._under_way = [each for each in self._under_way if each.readers or not each.done.done()]
        latest = self._latest
        older_read = any(each.readers for each in self._under_way if each is not latest)
        if latest is not None and not older_read and not latest.free.done():
            latest.free.set_result(None)
        self._changed.set()

    async def run(self) -> None:
        """Serves until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._changed.wait()
                self._changed.clear()
                if self._latest is not None:
                    self._distribute(self._latest, tasks)

    def _distribute(self, latest: Publication, tasks: asyncio.TaskGroup) -> None:
        """Starts whatever can be started for the members that are behind."""
        group, version = self._group, latest.version
        available = [member for member in self._roster if member not in self._busy and not member.holding]
        behind = [member for member in available if member.version != version]
        together: list[Member] = []
        if group is not None and version >= group.next_version:
            together = admitted([m for m in behind if self._choose(m, late=False) in BROADCAST], version)
        # Read from now on, not only from when a task begins to: else the snapshot might be overwritten before.
        for member in behind:
            if member not in together:
                name = self._choose(member, late=True)
                self._start(tasks, [member], self._deliver(member, latest, name, latest.read()))
        if together and group is not None and not self._must_wait(version):
            group.next_version, self._in_group = version + 1, together
            self._start(tasks, together, self._broadcast(group, together, latest, latest.read()))

    def _must_wait(self, version: int) -> bool:
        """Whether a broadcast waits for members: that is cheaper than another group without them.

        For those that apply the version before, and, as long as one step of a transfer may take, for those that keep a
        version for an evaluation; they fetch this version later.
        """
        if not self._busy.isdisjoint(admitted(self._in_group, version)):
            return True
        holding = [m for m in self._roster if m.holding and self._choose(m, late=False) in BROADCAST]
        if not admitted(holding, version):
            if self._patience is not None:
                self._patience.cancel()
            self._patience, self._patience_ended = None, False
            return False
        if self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(self._rpc.deadline_s, self._end_patience)
        return not self._patience_ended

    def _end_patience(self) -> None:
        self._patience_ended = True
        self.changed()

    def _choose(self, member: Member, *, late: bool) -> str | None:
        name = choose_transport(member, self._order, host=self._host, late=late)
        if name is None and member.record.avoided:
            member.record.avoided.clear()  # it is the only way, so it is tried again
            name = choose_transport(member, self._order, host=self._host, late=late)
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
        with suppress(Absent, TransferError):  # logged where it was found out; the others go on
            await work

    async def _deliver(self, member: Member, latest: Publication, name: str | None, reading: ExitStack) -> None:
        """Lets one member fetch a version and put it into its engine."""
        with reading:
            transfer = await self._fetch(member, latest, name, reading)
        self.changed()
        await self._apply(member, transfer, latest.version, self._turn)

    async def _fetch(self, member: Member, latest: Publication, name: str | None, reading: ExitStack) -> int:
        """Returns the transfer's number once the member has all bytes. Raises: Absent when it won't."""
        await self._check_heartbeat(member)
        if name is None:
            offered, sent = ", ".join(member.join.transports), ", ".join(self._order)
            raise await self._rpc.evict(member, f"receives through {offered}, but the learner sends through {sent}")
        snapshot = await latest.on_host()
        source = await self._source(member, snapshot, name)
        if name not in IN_PLACE:
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
        await self._rpc.expect(member, w.Ready, state="getting ready", version=latest.version)
        try:
            await self._rpc.expect(
                member,
                w.Loaded,
                state=f"receiving through {name} from {source.place}",
                version=latest.version,
                superseded=lambda: latest is not self._latest,
            )
        except Failing:
            self._avoid(member, name)
            raise
        except TransferError:
            self._overtaken(member, latest.version)
            raise
        member.record.overtaken = 0
        member.staged = latest.version
        return transfer

    @staticmethod
    def _avoid(member: Member, name: str) -> None:
        """The next attempt goes another way; what was wrong with this one may pass."""
        member.record.avoided[name] = time.monotonic() + AVOIDED_S

    @staticmethod
    def _overtaken(member: Member, version: int) -> None:
        member.record.overtaken += 1
        if member.record.overtaken % OVERTAKEN_OFTEN == 0:
            log.warning(
                "a rollout server fetches so slowly that each version is gone before it has it",
                server=member.name,
                versions=member.record.overtaken,
                last=version,
                remedy="a larger weights.publish_every_steps, or another transport",
            )

    async def _source(self, member: Member, snapshot: Snapshot, name: str) -> w.Source:
        """From where the member fetches the version.

        Raises: Absent, for it can't be had; TransferError when there is a newer one, which the member is brought next.
        """
        transport, version = self._fetched[name], snapshot.manifest.version
        async with self._preparing[name]:
            if version < self._prepared.get(name, version):  # after a newer one it would spoil what leads to that
                raise TransferError(f"version {version} is not the latest any more")
            try:
                await self._prepare(transport, snapshot, name)
                self._prepared[name] = version
                return transport.source(snapshot, member.staged)
            except TransferError as error:
                self._avoid(member, name)
                reason = f"the version can't be sent through {name}: {error}"
                raise await self._rpc.evict(member, reason, at_fault=False) from None

    async def _prepare(self, transport: Fetched, snapshot: Snapshot, name: str) -> None:
        """Raises: TransferError.

        A thread that hangs, as at a file system that has gone, can't be broken off, and reads the learner's memory: so
        training waits for it, but not in silence. Nor does it keep the learner from ending.
        """
        began = time.monotonic()
        preparing = run_in_thread(transport.prepare, snapshot)
        while not (await asyncio.wait({preparing}, timeout=self._rpc.deadline_s))[0]:
            log.error(
                "a version is still not ready to be fetched: the next publication, and training, wait for it",
                transport=name,
                version=snapshot.manifest.version,
                already_s=round(time.monotonic() - began, 1),
            )
        preparing.result()

    async def _broadcast(
        self, group: ProcessGroup, members: Sequence[Member], latest: Publication, reading: ExitStack
    ) -> None:
        """Sends a version to all members of the group, and lets each put it into its engine."""
        with reading:
            present = await self._responsive(members)
            if not present:
                return
            snapshot = latest.snapshot if group.on_device else await latest.on_host()
            try:
                transfer = await group.send(snapshot, present)
            except TransferError as error:
                if await self._all_present(present):  # else it broke off at who is gone
                    attribute_fault(present, group.done, group.next_version, str(error))
                raise
        record_success(present)
        self.changed()
        async with asyncio.TaskGroup() as applying:
            # Where it goes straight into engines all stand still by now: in turn they would only do so longer.
            turn = nullcontext() if group.on_device else self._turn
            for member in present:
                applying.create_task(self._tolerate(self._apply(member, transfer, latest.version, turn)))

    async def _all_present(self, members: Sequence[Member]) -> bool:
        """Whether nobody is gone; who is dead or silent is evicted now."""
        for member in members:
            with suppress(Absent):
                await self._rpc.send(member, w.Ping())
        return len(await self._responsive(members)) == len(members)

    async def _responsive(self, members: Sequence[Member]) -> list[Member]:
        """Those that are not silent; the others are evicted."""
        async with asyncio.TaskGroup() as looks:  # each may take a second
            for member in members:
                looks.create_task(self._tolerate(self._check_heartbeat(member)))
        return [member for member in members if not member.gone.is_set()]

    async def _check_heartbeat(self, member: Member) -> None:
        """Evicts a member that is silent. Raises: Absent."""
        if member.silent_s > SILENT_AT_REST_S:
            # After a pause of this very process nobody has been heard for long, but their words wait.
            await asyncio.sleep(SECOND_LOOK_S)
        if member.silent_s > SILENT_AT_REST_S:
            raise await self._rpc.evict(member, f"silent for {member.silent_s:.0f} s")

    async def _apply(self, member: Member, transfer: int, version: int, turn: AbstractAsyncContextManager[Any]) -> None:
        async with turn:
            await self._rpc.send(member, w.Apply(transfer=transfer, version=version))
            applied = await self._rpc.expect(member, w.Applied, state="applying", version=version)
        self._roster.applied(member, version)
        self._figures.stalls_s.append(applied.stall_s)
        if applied.verified == w.BY_PROBE:
            self._figures.deviations.append(applied.deviation)
        self.changed()
