"""Runs async rewards in one worker process, many groups at once: one that waits for a judge delays no other group."""

import asyncio
import itertools
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from slipstream.configs.runtime.threads import run_in_thread
from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import Episode, Failure, Result
from slipstream.rewards.compose import Call, Reward
from slipstream.rewards.runners.base import (
    LENGTH_BYTES,
    UnreadableInfo,
    WorkerEnded,
    chosen,
    decode_reply,
    decode_request,
    encode_error,
    encode_reply,
    encode_request,
    framed,
    load_in_worker,
    start_worker,
)

GROUPS: Final = 64
"""Groups at once."""
_CANCEL_S: Final = 10.0  # for a cancelled call to end; a reward that takes longer blocks the event loop of all
_LONGEST_WAIT_S: Final = 60.0
_REAP_S: Final = 5.0


class SharedWorker:
    """The parent's handle of the process.

    Attributes:
        retired: true once a call that has hit its limit may go on in a thread. It gets no more calls, and ends when the
            others have their scores.
    """

    def __init__(self, terms: Sequence[RewardConfig], *, deadline_s: float) -> None:
        """Starts the process; call it where an event loop runs."""
        self._socket, self._process = start_worker(_work, terms, deadline_s)
        self._heard_at = time.monotonic()
        self._writer: asyncio.StreamWriter | None = None
        self._loaded = asyncio.Event()
        self.retired = False
        self._end: WorkerEnded | None = None
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count(1)
        self._tasks = {asyncio.create_task(self._read())}

    @property
    def ended(self) -> bool:
        """True if it can't be used further."""
        return self._end is not None

    async def loaded(self, within_s: float) -> None:
        """Returns once its rewards are loaded. Raises: WorkerEnded; TimeoutError after `within_s`."""
        try:
            async with asyncio.timeout(within_s):
                await self._loaded.wait()
        except TimeoutError:
            self.kill()
            raise
        self._check()

    async def score(self, reward: Reward, episodes: Sequence[Episode]) -> list[Result]:
        """The results of one call. Raises: WorkerEnded, UnreadableInfo."""
        self._check()
        call = Call(reward.name, tuple(range(len(episodes))))
        number, request = next(self._numbers), encode_request([call], episodes)
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(number, request)
            await self._replied(reply, reward.limit_s(len(episodes)))
        finally:
            if not reply.done():
                cancelling = asyncio.create_task(self._cancel(number, reply))
                self._tasks.add(cancelling)
                cancelling.add_done_callback(self._tasks.discard)
            self._end_if_retired()
        if not reply.result():  # the process has ended before
            self._check()
        try:
            results = decode_reply(reply.result(), len(episodes))
        except WorkerEnded as error:
            self._fail(error)
            raise
        if reward.uses_threads and any(map(_has_timed_out, results)):
            self.retired = True
            self._end_if_retired()
        return results

    def kill(self) -> None:
        """Ends the process; its guard ends the processes that its rewards have started."""
        self._process.kill()
        self._fail(WorkerEnded("the worker process was killed"))

    def close(self) -> None:
        """Ends the process, and waits for that."""
        self.kill()
        for task in self._tasks:
            task.cancel()
        if self._writer is None:
            self._socket.close()
        else:
            self._writer.transport.abort()
        self._process.join(_REAP_S)

    def _check(self) -> None:
        if self._end is not None:
            raise WorkerEnded(str(self._end))

    async def _replied(self, reply: "asyncio.Future[bytes]", limit_s: float) -> None:
        """Waits for a reply. The process observes limits itself, and is ended when its event loop is blocked.

        Until then it must have sent nothing for all of the limit: on a busy machine calls begin late.
        """
        now, began_at = time.monotonic, time.monotonic()
        while not reply.done():
            left_s = max(began_at, self._heard_at) + limit_s + _CANCEL_S - now()
            if left_s > 0:
                await asyncio.wait([reply], timeout=min(left_s, _LONGEST_WAIT_S))
            else:
                self._fail(WorkerEnded("an async reward blocks the event loop of its worker process"))

    def _send(self, number: int, message: bytes) -> None:
        assert self._writer is not None, "it is loaded"
        self._writer.write(framed(number.to_bytes(LENGTH_BYTES) + message))

    async def _cancel(self, number: int, reply: "asyncio.Future[bytes]") -> None:
        if self._end is None:
            self._send(number, b"")
            await asyncio.wait([reply], timeout=_CANCEL_S)
            if not reply.done():
                self._fail(WorkerEnded("an async reward blocks the event loop of its worker process"))
        self._end_if_retired()

    def _end_if_retired(self) -> None:
        if self.retired and not self._waiting:
            self._fail(WorkerEnded("a call hangs in a thread of the worker process"))

    async def _read(self) -> None:
        """Hands replies to those who wait, until the process ends."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        try:
            await self._hand_out(reader)
            await run_in_thread(self._process.join, _REAP_S)
            self._fail(WorkerEnded(f"the worker process ended with exit code {self._process.exitcode}"))
        finally:
            self._fail(WorkerEnded("the event loop that it was started in has ended"))
            self._writer.transport.abort()

    async def _hand_out(self, reader: asyncio.StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                message = await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH_BYTES)))
                self._heard_at = time.monotonic()
                if not message:
                    self._loaded.set()
                    continue
                number = int.from_bytes(message[:LENGTH_BYTES])
                reply = self._waiting.pop(number, None)
                if reply is None:  # a reward has written into the socket
                    return self._fail(WorkerEnded("the worker process sent an invalid reply"))
                if not reply.done():
                    reply.set_result(message[LENGTH_BYTES:])

    def _fail(self, error: WorkerEnded) -> None:
        if self._end is None:
            self._end = error
            self._process.kill()
        self._loaded.set()
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_result(b"")
        self._waiting.clear()


def _has_timed_out(result: Result) -> bool:
    return isinstance(result, Failure) and result.reason == "reward_timeout"


# --- in the worker process --------------------------------------------------------------------------------------------


def _work(server: socket.socket, terms: Sequence[RewardConfig], deadline_s: float, server_id: int) -> None:
    asyncio.run(_serve(server, load_in_worker(terms, deadline_s, server_id)))


async def _serve(server: socket.socket, rewards: Mapping[str, Reward]) -> None:
    process, running = os.getpid(), dict[int, asyncio.Task[None]]()
    reader, writer = await asyncio.open_connection(sock=server)

    async def answer(number: int, message: bytes) -> None:
        try:
            request = decode_request(message)
            (call,) = request.calls
            reply = encode_reply(await rewards[call.name].run_async(chosen(call, request.episodes)))
        except UnreadableInfo as error:
            reply = encode_error(error)
        except asyncio.CancelledError:
            reply = encode_reply([])  # nobody waits for it
        if os.getpid() != process:  # a reward has forked, and its copy returned here
            os._exit(0)
        writer.write(framed(number.to_bytes(LENGTH_BYTES) + reply))
        del running[number]

    writer.write(framed(b""))
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            message = await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH_BYTES)))
            number, request = int.from_bytes(message[:LENGTH_BYTES]), message[LENGTH_BYTES:]
            if request:
                running[number] = asyncio.create_task(answer(number, request))
            elif number in running:
                running[number].cancel()
