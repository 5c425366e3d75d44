"""Requests to rollout servers, each with a deadline; a server that does not answer is evicted."""

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from slipstream.buffer.wire.codec import encode
from slipstream.buffer.wire.messages import Message
from slipstream.buffer.wire.weights import protocol as w
from slipstream.learner.weights.members import SILENT_S, Absent, Failing, Member, Roster
from slipstream.learner.weights.transports.base import TransferError

QUIET_S = 2.0
"""Time without a heartbeat after which the connection is tested: a dead process has none."""
CHECK_S = 1.0
GRACE_S = 2.0

Answer = TypeVar("Answer", w.Entered, w.Ready, w.Loaded, w.Applied)


class Rpc:
    """Requests to rollout servers and their answers, on the control plane."""

    def __init__(self, socket: zmq.asyncio.Socket, roster: Roster, *, deadline_s: float) -> None:
        self._socket = socket
        self._roster = roster
        self.deadline_s = deadline_s
        # Random start: an answer to an earlier learner must not match.
        self._transfers = itertools.count(random.SystemRandom().getrandbits(52))

    def begin(self, members: Sequence[Member]) -> int:
        """Number of a new transfer with these members; answers to their earlier ones are dropped from now on."""
        transfer = next(self._transfers)
        for member in members:
            member.transfer = transfer
            member.inbox = asyncio.Queue(member.inbox.maxsize)
        return transfer

    def receive(self, peer: bytes, message: Any) -> None:
        """Passes an answer to the request that waits for it."""
        member = self._roster.of(peer)
        if member is not None and message.transfer == member.transfer and not member.inbox.full():
            member.inbox.put_nowait(message)

    async def send(self, member: Member, message: Message) -> None:
        """Raises: Absent when the member is gone."""
        if member.gone.is_set():
            raise Absent(f"{member.name}: {member.reason}")
        try:
            await self._socket.send_multipart([member.peer, encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise await self.evict(member, f"connection gone, {type(message).__name__} could not be sent") from None

    async def expect(
        self,
        member: Member,
        kind: type[Answer],
        *,
        state: str,
        version: int | None = None,
        in_step: bool = False,
        superseded: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """The next answer of a member, which must be of this kind and for this version.

        Args:
            in_step: other members take part, so that one of them may be the cause if this one fails or is late.
            superseded: whether there is a later version by now, which may have replaced the one that it fetches.

        Raises: Absent when the member is evicted, for a wrong answer or for none within the deadline, or is gone;
        Failing when it is evicted because it reported a failure; TransferError instead of both where `in_step`, and
        where the source is gone because the version was `superseded`.
        """
        member.state = state
        # The transport's own deadline comes first: its error names the absent ranks.
        deadline_s = self.deadline_s + (GRACE_S if in_step else 0.0)
        try:
            answer = await self._next(member, deadline_s, may_hold=kind in (w.Ready, w.Applied))
        except TimeoutError:
            late = f"no answer for {self.deadline_s:.0f} s while {state}"
            if in_step:
                raise TransferError(f"{member.name}: {late}") from None
            raise await self.evict(member, late) from None
        if isinstance(answer, w.Failed):
            failure = f"{answer.stage} failed: {answer.detail}"
            if in_step or (answer.gone and superseded()):
                raise TransferError(f"{member.name}: {failure}")
            raise Failing(str(await self.evict(member, failure)))
        if not isinstance(answer, kind):
            due, came = kind.__name__, type(answer).__name__
            raise await self.evict(member, f"answered {came} while {due} was due")
        answered = getattr(answer, "version", version)
        if version is not None and answered != version:
            raise await self.evict(member, f"answered {kind.__name__} for version {answered}, not for {version}")
        return answer

    async def evict(self, member: Member, reason: str, *, at_fault: bool = True) -> Absent:
        """Evicts a member, as `Roster.evict` does, and notifies it; returns the error to raise."""
        if not member.gone.is_set():
            retry_s = self._roster.evict(member, reason, at_fault=at_fault)
            try:
                await self._socket.send_multipart([member.peer, encode(w.Evicted(reason=reason, retry_s=retry_s))])
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
        return Absent(f"{member.name}: {member.reason}")

    async def _next(self, member: Member, deadline_s: float, *, may_hold: bool) -> Any:
        """The next answer.

        Args:
            may_hold: the deadline starts again when the member has finished an evaluation.

        Raises: TimeoutError at the deadline, Absent when the member is gone or has been silent for long.
        """
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        while True:
            silent = member.silent_s > SILENT_S
            if may_hold and member.holding:
                asked_at = loop.time()
            left_s = deadline_s - (loop.time() - asked_at)
            answer = None
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(CHECK_S, left_s))):
                    answer = await member.inbox.get()
            if answer is not None:
                return answer
            if member.gone.is_set():
                raise Absent(f"{member.name}: {member.reason}")
            if member.silent_s > QUIET_S:
                await self.send(member, w.Ping())
            # Checked twice: after a pause of this process, heartbeats may be waiting in the socket.
            if silent and member.silent_s > SILENT_S:
                raise await self.evict(member, f"silent for {member.silent_s:.0f} s while {member.state}")
            if left_s <= 0:
                raise TimeoutError


async def gather_answers(questions: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All answers, or the first error; the other requests are then cancelled, without evictions."""
    tasks = [asyncio.ensure_future(question) for question in questions]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
