"""The process group of a broadcast, and the protocol of one broadcast."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from slipstream.buffer.wire.weights import protocol as w
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.members import Absent, Member, record_fault
from slipstream.learner.weights.rpc import GRACE_S, Answer, Rpc, gather_answers
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports.base import Broadcast, TransferError

log = get_log("learner.weights")


class ProcessGroup:
    """The members that a version is broadcast to, as ranks 1 and up; the learner is rank 0.

    Attributes:
        next_version: the first version that may be broadcast. After n failed broadcasts in a row, 2**(n - 1) - 1
            versions are skipped, so that a lasting fault, perhaps of the learner's host, costs less and less.
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

    @property
    def on_device(self) -> bool:
        """True if snapshots must lie in the accelerator's memory."""
        return self._transport.on_device

    @property
    def members(self) -> Sequence[Member]:
        """Members of the group that is formed; empty if there is none."""
        return self._members

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
