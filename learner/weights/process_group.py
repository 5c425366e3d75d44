"""The process group of a broadcast: its members, the protocol of one broadcast, and faults in it."""

import asyncio
import random
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from slipstream.buffer.wire.weights import protocol as w
from slipstream.buffer.wire.weights.fabric import TransferError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.members import GRACE_S, Absent, Answer, Member, Rpc
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports import Broadcast

log = get_log("learner.weights")


class ProcessGroup:
    """The members that a version is broadcast to, as ranks 1 and up; the learner is rank 0.

    Attributes:
        next_version: the first version that may be broadcast. After n failed broadcasts in a row, 2**(n - 1) - 1
            versions are skipped, so that a lasting fault, perhaps of the learner's host, costs less and less.
        changed: set when a broadcast that waited for members may begin.
        done: members that have completed the current step of the transfer, or the step at which it broke off.
    """

    def __init__(self, config: WeightsConfig, transport: Broadcast, rpc: Rpc) -> None:
        self._config = config
        self._transport = transport
        self._rpc = rpc
        # Random start: a server that still enters a group of an earlier learner must not match.
        self._epoch = random.SystemRandom().getrandbits(31)
        self._members: list[Member] = []
        self._broken = 0
        self.next_version = 0
        self.done: set[Member] = set()
        self.changed = asyncio.Event()
        self._latest: list[Member] = []
        self._wait: asyncio.TimerHandle | None = None
        self._wait_ended = False

    @property
    def on_device(self) -> bool:
        """True if snapshots must lie in the accelerator's memory."""
        return self._transport.on_device

    @property
    def members(self) -> Sequence[Member]:
        """Members of the group that is formed; empty if there is none."""
        return self._members

    def next_members(self, resting: Sequence[Member], busy: Sequence[Member], version: int) -> list[Member]:
        """Those of the members at rest that the version is broadcast to; the others fetch it."""
        return next_group(
            admitted(resting, version),
            self._members,
            others_fetch=bool(admitted([member for member in busy if member not in self._members], version)),
            max_wait_s=self._rpc.deadline_s,
        )

    def must_wait(self, version: int, *, busy: Collection[Member], holding: Sequence[Member]) -> bool:
        """True if a broadcast waits for members: that is cheaper than another group without them.

        For those that apply the version before, and, as long as one step of a transfer may take, for those that keep a
        version for an evaluation; they fetch this version later.
        """
        if any(member in busy for member in admitted(self._latest, version)):
            return True
        if not admitted(holding, version):
            if self._wait is not None:
                self._wait.cancel()
            self._wait, self._wait_ended = None, False
            return False
        if self._wait is None:
            self._wait = asyncio.get_running_loop().call_later(self._rpc.deadline_s, self._end_wait)
        return not self._wait_ended

    def _end_wait(self) -> None:
        self._wait_ended = True
        self.changed.set()

    def begin(self, version: int, members: Sequence[Member]) -> None:
        """Reserves a version for these members, to which `send` will broadcast it."""
        self.next_version, self._latest = version + 1, list(members)

    async def send(self, snapshot: Snapshot, members: Sequence[Member]) -> int:
        """Broadcasts a version, up to `Loaded`; returns the transfer's number.

        Raises: Absent or TransferError when it broke off; a member that is known to be at fault is evicted then.
        """
        version = snapshot.manifest.version
        self._broken += 1  # reset on success
        self.next_version = version + 2 ** (self._broken - 1)
        try:
            if set(members) != set(self._members):
                await self._form(members)
            transfer = await self._send(snapshot)
        except (Absent, TransferError) as error:
            self._members = []
            log.warning(
                "transfer group broke off",
                epoch=self._epoch,
                version=version,
                members=[member.name for member in members],
                reason=str(error),
                next_version=self.next_version,
            )
            raise
        self._broken, self.next_version = 0, version + 1
        return transfer

    async def _form(self, members: Sequence[Member]) -> None:
        self._epoch += 1
        self._members = []
        transfer = self._rpc.begin(members)
        rank, ranks = 1, dict[int, Member]()
        world = 1 + sum(self._ranks(member) for member in members)
        for member in members:
            form = w.Form(
                transfer=transfer,
                epoch=self._epoch,
                transport=self._transport.name,
                host=self._config.host,
                port=self._config.store_port,
                rank=rank,
                world=world,
                # The learner's own deadline comes first: its error names the absent ranks.
                deadline_s=self._config.deadline_s + GRACE_S,
                bucket_bytes=self._config.bucket_bytes,
            )
            ranks |= dict.fromkeys(range(rank, rank + self._ranks(member)), member)
            rank += self._ranks(member)
            await self._rpc.send(member, form)
        self.done.clear()
        entering = [self._expect_step(member, w.Entered, state="entering the transfer group") for member in members]
        try:
            await self._run_with_answers(entering, self._transport.form, self._epoch, world)
        except TransferError as error:
            for member in {ranks[absent] for absent in error.absent if absent in ranks}:
                record_fault(member, self.next_version, str(error))
                await self._rpc.evict(member, "did not enter the transfer group in time")
            raise
        self._members = list(members)
        log.info("transfer group formed", epoch=self._epoch, members=[member.name for member in members])

    async def _send(self, snapshot: Snapshot) -> int:
        version, members = snapshot.manifest.version, self._members
        transfer = self._rpc.begin(members)
        announce = w.Announce(
            transfer=transfer,
            transport=self._transport.name,
            manifest=snapshot.manifest,
            deadline_s=self._config.deadline_s,
            epoch=self._epoch,
        )
        for member in members:
            await self._rpc.send(member, announce)
        await gather_answers(
            [self._rpc.expect(member, w.Ready, state="getting ready", version=version) for member in members]
        )
        for member in members:
            await self._rpc.send(member, w.Sending(transfer=transfer, version=version))
        self.done.clear()
        loading = [self._expect_step(member, w.Loaded, state="receiving", version=version) for member in members]
        await self._run_with_answers(loading, self._transport.send, snapshot)
        for member in members:
            member.staged = version
        return transfer

    async def _expect_step(self, member: Member, kind: type[Answer], *, state: str, version: int | None = None) -> None:
        await self._rpc.expect(member, kind, state=state, version=version, in_step=True)
        self.done.add(member)

    async def _run_with_answers(
        self, answers: Sequence[Coroutine[Any, Any, Any]], call: Callable[..., None], *arguments: object
    ) -> None:
        """Runs a blocking call of the transport while members answer; the first failure ends both."""
        blocking = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
        answering = asyncio.ensure_future(gather_answers(answers))
        try:
            # Answers have deadlines of their own, the call has the transport's.
            done, _ = await asyncio.wait({blocking, answering}, return_when=asyncio.FIRST_EXCEPTION)
            if answering in done and answering.exception() is not None and blocking not in done:
                await asyncio.to_thread(self._transport.abort)  # destroying a communicator may block
                await asyncio.wait({blocking}, timeout=self._config.deadline_s)
        except asyncio.CancelledError:
            self._transport.abort()  # the learner ends, which waits for the thread of this call
            raise
        finally:
            answering.cancel()
            blocking.cancel()
        for task in (answering, blocking):
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def _ranks(self, member: Member) -> int:
        return member.join.workers if self._transport.on_device else 1


async def gather_answers(questions: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All answers, or the first error; the other requests are then cancelled, without evictions."""
    tasks = [asyncio.ensure_future(question) for question in questions]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


# --- members of the next broadcast, and faults ------------------------------------------------------------------------

CHECK = "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME there, firewalls between it, the learner and the other servers"


def admitted(members: Sequence[Member], version: int) -> list[Member]:
    """Those of the members that a version may be broadcast to; the others fetch it."""
    willing = [member for member in members if member.record.broadcast_from <= version]
    doubtful = sorted(
        (member for member in willing if member.suspects), key=lambda member: (member.record.breaks, member.suspects)
    )
    put_off = doubtful[max(1, doubtful[0].suspects // 2) :] if doubtful else []
    return [member for member in willing if member not in put_off]


def next_group(
    willing: Sequence[Member], formed: Collection[Member], *, others_fetch: bool, max_wait_s: float
) -> list[Member]:
    """Members of the next broadcast: newcomers wait for each other, so that all enter in one re-forming.

    Args:
        willing: members at rest that the version may be broadcast to.
        formed: members of the process group that exists. If one of them is gone, it is re-formed anyway.
        others_fetch: more newcomers are still fetching an earlier version.
        max_wait_s: no newcomer waits longer than this since it joined.
    """
    newcomers = [member for member in willing if member not in formed]
    stands = bool(formed) and not any(member.gone.is_set() for member in formed)
    if stands and others_fetch and all(time.monotonic() - member.joined_at < max_wait_s for member in newcomers):
        return [member for member in willing if member in formed]
    return list(willing)


def record_success(members: Sequence[Member]) -> None:
    """A broadcast reached all of them."""
    for member in members:
        if member.record.breaks:
            log.info("broadcasts reach a rollout server again", server=member.name)
        member.proven, member.suspects, member.record.breaks = True, 0, 0


def attribute_fault(members: Sequence[Member], done: Collection[Member], next_version: int, reason: str) -> None:
    """Attributes a broadcast that broke off to members.

    Args:
        done: who did its part of the step at which the broadcast broke off; the others may also be victims of one.
        next_version: the first that is broadcast again.
    """
    not_done = [member for member in members if member not in done]
    # Who was reached before is rather the victim of one that never was.
    suspects = [member for member in not_done if not member.proven] or not_done
    for member in suspects:
        member.proven, member.suspects = False, len(suspects)
    if len(suspects) == 1:
        record_fault(suspects[0], next_version, reason)


def record_fault(member: Member, next_version: int, reason: str) -> None:
    """A broadcast broke off at this member: it fetches for a while, from `next_version` on."""
    record = member.record
    record.breaks += 1
    record.broadcast_from = next_version + 2 ** (record.breaks - 1)
    if record.breaks == 1:
        log.warning(
            "broadcasts don't reach a rollout server: it fetches its weights instead",
            server=member.name,
            reason=reason,
            tried_again_at_version=record.broadcast_from,
            check=CHECK,
        )
