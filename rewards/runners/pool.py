"""Runs rewards in worker processes, which are killed at a group's deadline.

Each worker has its own socket and can be killed at any time. In the pools of libraries workers share a pipe and a lock,
so that one worker that is stuck in C code, or crashes while it holds them, blocks all others.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from multiprocessing import get_context
from typing import Final

import msgspec

from slipstream.configs.runtime.errors import SlipstreamError, format_error
from slipstream.configs.runtime.processes import guard_this_process
from slipstream.configs.runtime.threads import run_in_thread
from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import Episode, FailureReason, RewardFailed
from slipstream.rewards.compose import Reward, Scores, score_async, score_plain
from slipstream.rewards.registry import find_rewards
from slipstream.rewards.runners.base import late

_START_S = 90.0  # a worker's interpreter and the plug-ins' imports
_LENGTH_BYTES = 8  # before each message
_PIECE_BYTES = 1 << 20
_REAP_S = 5.0  # how long the kernel may take to end a process


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A group to score under these rewards."""

    names: tuple[str, ...]
    episodes: tuple[Episode, ...]


class Scored(msgspec.Struct, frozen=True, tag=True):
    """Reply: the group's scores."""

    scores: Scores


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Reply: the group can't be scored."""

    reason: FailureReason
    detail: str


# Not pickle: reading one runs code that its writer chose, and a reward can write into its process's socket.
_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final = msgspec.msgpack.Decoder(Request)
_replies: Final = msgspec.msgpack.Decoder(Scored | Failure)
_ENCODE_ERRORS: Final = (TypeError, ValueError, OverflowError, RecursionError)
_DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class WorkerEnded(SlipstreamError):
    """The process has ended, or can't be used further."""


class Worker:
    """The parent's handle of a worker process.

    Attributes:
        is_loaded: whether it has reported that its rewards are loaded.
    """

    def __init__(self, terms: Sequence[RewardConfig]) -> None:
        """Starts the process, with the rewards of these terms."""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            # spawn: a fork would copy the engine's threads and locks.
            self._process = get_context("spawn").Process(
                target=_work, args=(theirs, tuple(terms), os.getpid()), name="rewards"
            )
            self._process.start()
        self._started = time.monotonic()
        self.is_loaded = False
        self._is_usable = True

    @property
    def alive(self) -> bool:
        """True if its process runs."""
        return self._process.is_alive()

    @property
    def idle(self) -> bool:
        """True if it can be given a group; it may still load its rewards."""
        return self._is_usable and self.alive

    async def loaded(self, within_s: float) -> None:
        """Returns once its rewards are loaded; when the wait is cancelled it goes on loading.

        Raises: WorkerEnded; TimeoutError when it was started `within_s` ago, and then it must be killed.
        """
        if self.is_loaded:
            return
        try:
            async with asyncio.timeout(self._started + within_s - time.monotonic()):
                report = await self._load_report()
        except TimeoutError:
            self._is_usable = False
            raise
        if not report:
            raise await self._ended()
        self.is_loaded = True

    async def score(self, names: Sequence[str], episodes: Sequence[Episode]) -> Scores:
        """The scores of a group; when this is cancelled, the worker must be killed.

        Raises: RewardFailed, WorkerEnded.
        """
        group = _encoded(names, episodes)
        self._is_usable = False
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, _framed(group))
        except ConnectionError:
            raise await self._ended() from None
        try:
            reply: Scored | Failure = _replies.decode(await self._message())
        except _DECODE_ERRORS as error:  # rewards run in that process, and may write into its socket
            raise WorkerEnded(f"the worker process sent an invalid reply: {error}") from None
        if isinstance(reply, Failure):
            self._is_usable = True
            raise RewardFailed(reply.reason, reply.detail)
        if {name: len(column) for name, column in reply.scores.items()} != dict.fromkeys(names, len(episodes)):
            raise WorkerEnded("the worker process sent an invalid reply: not a score of each reward for each episode")
        self._is_usable = True
        return reply.scores

    def kill(self) -> None:
        """Ends the process; its guard ends the processes that its rewards have started."""
        self._process.kill()
        self._socket.close()

    def reap(self) -> None:
        """Waits until the process has ended."""
        self._process.join(_REAP_S)

    async def _load_report(self) -> bytes:
        """Its first message; empty if the process has ended. A cancelled `sock_recv` could lose it."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._socket, readable.set)
        try:
            while True:
                with suppress(BlockingIOError):
                    return self._socket.recv(_LENGTH_BYTES)
                await readable.wait()
        finally:
            loop.remove_reader(self._socket)

    async def _message(self) -> bytes:
        return await self._read(int.from_bytes(await self._read(_LENGTH_BYTES)))

    async def _read(self, size: int) -> bytes:
        """Raises: WorkerEnded."""
        read = bytearray()
        while len(read) < size:
            try:
                piece = await asyncio.get_running_loop().sock_recv(self._socket, min(_PIECE_BYTES, size - len(read)))
            except ConnectionError:
                piece = b""
            if not piece:
                raise await self._ended()
            read += piece
        return bytes(read)

    async def _ended(self) -> WorkerEnded:
        await run_in_thread(self.reap)
        return WorkerEnded(f"the worker process ended with exit code {self._process.exitcode}")


def _encoded(names: Sequence[str], episodes: Sequence[Episode]) -> bytes:
    """A group for a worker. Raises: RewardFailed for a task's info beyond JSON values."""
    try:
        return _encoder.encode(Request(tuple(names), tuple(episodes)))
    except _ENCODE_ERRORS as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> RewardFailed:
    return RewardFailed("reward_error", f"the task's info must be plain JSON values: {format_error(error)}")


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES) + message


class PoolRunner:
    """Worker processes that are started when they are needed, up to `workers`; each scores one group at a time."""

    def __init__(self, terms: Sequence[RewardConfig], *, workers: int, deadline_s: float) -> None:
        """Rewards are built here, to fail at start, and once in each worker; a group has `deadline_s` in a worker.

        Raises: ConfigError if a reward can't be built.
        """
        self._terms = tuple(terms)
        find_rewards(terms)
        self.slots = workers
        self._deadline_s = deadline_s
        self._workers: set[Worker] = set()
        """Killed ones stay until their processes have ended."""
        self._idle: list[Worker] = []
        self._free = asyncio.Semaphore(workers)

    async def score(self, names: Sequence[str], episodes: Sequence[Episode]) -> Scores:
        """As the protocol has it. Raises: RewardFailed."""
        async with self._worker() as worker:
            missed = RewardFailed(
                "reward_timeout",
                f"{self._listed}: no worker has loaded it within {_START_S:g} s; load slow things in the first call",
            )
            try:
                await worker.loaded(_START_S)
                missed = late(names, self._deadline_s)
                async with asyncio.timeout(self._deadline_s):
                    return await worker.score(names, episodes)
            except TimeoutError:
                raise missed from None
            except WorkerEnded as error:
                raise RewardFailed("reward_crash", f"{self._listed}: {error}") from None

    def close(self) -> None:
        """Kills the workers; call it when nobody waits for scores any more."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.reap()
        self._workers.clear()
        self._idle.clear()

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[Worker]:
        """A worker for one group. Afterwards a busy one is killed, unless it still loads its rewards."""
        async with self._free:
            worker = self._take()
            try:
                yield worker
            finally:
                if worker.idle:
                    # Loaded ones are taken first, which is from the end.
                    self._idle.insert(len(self._idle) if worker.is_loaded else 0, worker)
                else:
                    worker.kill()

    def _take(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.idle:
                return worker
            worker.kill()  # it ended since its last group, by no fault of this one
        self._workers = {worker for worker in self._workers if worker.alive}
        try:
            worker = Worker(self._terms)
        except OSError as error:
            raise RewardFailed("reward_crash", f"{self._listed}: no worker process can be started: {error}") from error
        self._workers.add(worker)
        return worker

    @property
    def _listed(self) -> str:
        return ", ".join(term.name for term in self._terms)


# --- in the worker process --------------------------------------------------------------------------------------------


def _work(server: socket.socket, terms: Sequence[RewardConfig], server_id: int) -> None:
    worker = os.getpid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C in the terminal
    guard_this_process(f"SLIPSTREAM_REWARDS={worker}-{time.time_ns()}", server_id)
    rewards = find_rewards(terms)
    server.sendall(_framed(b""))
    # One event loop for all groups: the clients that async rewards keep open belong to it.
    with asyncio.Runner() as runner, server.makefile("rb") as requests:
        while length := requests.read(_LENGTH_BYTES):
            reply = _reply(rewards, requests.read(int.from_bytes(length)), runner)
            if os.getpid() != worker:  # a reward has forked, and its copy returned here
                os._exit(0)
            server.sendall(_framed(reply))


def _reply(rewards: Mapping[str, Reward], request: bytes, runner: asyncio.Runner) -> bytes:
    try:
        try:
            group = _requests.decode(request)
        except _DECODE_ERRORS as error:  # such as a key that is no text
            raise _unreadable(error) from error
        chosen = [rewards[name] for name in group.names]
        # Plain functions run outside of the event loop: they may call asyncio.run themselves.
        scores = score_plain(chosen, group.episodes)
        if any(reward.is_async for reward in chosen):
            scores |= runner.run(score_async(chosen, group.episodes))
        return _encoder.encode(Scored(scores))
    except RewardFailed as failed:
        # Errors of user code may contain lone surrogates.
        return _encoder.encode(Failure(failed.reason, failed.detail.encode(errors="replace").decode()))
