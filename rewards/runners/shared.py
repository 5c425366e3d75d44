"""Runs async rewards in one worker process, many groups at once: one that waits for a judge delays no other group."""

import asyncio
import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from slipstream.configs.runtime.threads import run_in_thread
from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import Episode, RewardFailed
from slipstream.rewards.compose import Reward, Scores, score_async
from slipstream.rewards.runners.base import late, load_in_worker, start_worker
from slipstream.rewards.runners.messages import (
    LENGTH_BYTES,
    WorkerEnded,
    decode_reply,
    decode_request,
    encode_failure,
    encode_request,
    encode_scores,
    framed,
)

GROUPS: Final = 64
"""Groups at once."""
_CANCEL_S: Final = 2.0  # for a cancelled group to end; a reward that takes longer blocks the event loop of all
_REAP_S: Final = 5.0


class SharedWorker:
    """The parent's handle of the process.

    Attributes:
        retired: true once a group has exceeded its deadline: what hangs may hold up later groups too. It gets no more
            groups, and ends when the others have their scores.
    """

    def __init__(self, terms: Sequence[RewardConfig], *, deadline_s: float) -> None:
        """Starts the process; call it where an event loop runs. A group has `deadline_s`."""
        self._socket, self._process = start_worker(_work, terms)
        self._deadline_s = deadline_s
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

    async def score(self, names: Sequence[str], episodes: Sequence[Episode]) -> Scores:
        """The scores of a group. Raises: RewardFailed, WorkerEnded."""
        self._check()
        number, group = next(self._numbers), encode_request(names, episodes)
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(number, group)
            await asyncio.wait([reply], timeout=self._deadline_s)
            if not reply.done():
                self.retired = True
                raise late(names, self._deadline_s)
        finally:
            if not reply.done():
                cancelling = asyncio.create_task(self._cancel(number, reply))
                self._tasks.add(cancelling)
                cancelling.add_done_callback(self._tasks.discard)
            self._end_if_retired()
        self._check()
        try:
            return decode_reply(reply.result(), names, len(episodes))
        except WorkerEnded as error:
            self._fail(error)
            raise

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
            self._fail(WorkerEnded("a group exceeded its deadline in the worker process"))

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


# --- in the worker process --------------------------------------------------------------------------------------------


def _work(server: socket.socket, terms: Sequence[RewardConfig], server_id: int) -> None:
    asyncio.run(_serve(server, load_in_worker(terms, server_id)))


async def _serve(server: socket.socket, rewards: Mapping[str, Reward]) -> None:
    process, running = os.getpid(), dict[int, asyncio.Task[None]]()
    reader, writer = await asyncio.open_connection(sock=server)

    async def answer(number: int, message: bytes) -> None:
        try:
            group = decode_request(message)
            scores = await score_async([rewards[name] for name in group.names], group.episodes)
            reply = encode_scores(scores)
        except RewardFailed as failed:
            reply = encode_failure(failed)
        except asyncio.CancelledError:
            reply = encode_failure(RewardFailed("reward_timeout", "cancelled"))
        if os.getpid() != process:  # a reward has forked, and its copy returned here
            os._exit(0)
        writer.write(framed(number.to_bytes(LENGTH_BYTES) + reply))
        del running[number]

    writer.write(framed(b""))
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            message = await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH_BYTES)))
            number, group = int.from_bytes(message[:LENGTH_BYTES]), message[LENGTH_BYTES:]
            if group:
                running[number] = asyncio.create_task(answer(number, group))
            elif number in running:
                running[number].cancel()
