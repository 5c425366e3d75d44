"""A worker process that loads the rewards once and scores one group after the other.

Each has its own socket and can be killed at any time. In the pools of libraries workers share a pipe and a lock, so
that one worker that is stuck in C code, or crashes while it holds them, blocks all others.
"""

import asyncio
import os
import pickle
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from typing import BinaryIO

from slipstream.configs.runtime.errors import SlipstreamError, format_error
from slipstream.configs.runtime.processes import guard_this_process
from slipstream.configs.runtime.threads import run_in_thread
from slipstream.rewards.base import Episode, RewardFailed
from slipstream.rewards.compose import Reward, Scores, score_async, score_plain
from slipstream.rewards.registry import find_rewards

_LENGTH_BYTES = 8  # before each message
_PIECE_BYTES = 1 << 20
_REAP_S = 5.0  # how long the kernel may take to end a process


class WorkerEnded(SlipstreamError):
    """The process has ended."""


class Worker:
    """The parent's handle of a worker process.

    Attributes:
        is_loaded: whether it has reported that its rewards are loaded.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Starts the process, with the rewards of these names."""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            # spawn: a fork would copy the engine's threads and locks.
            self._process = get_context("spawn").Process(
                target=_work, args=(theirs, tuple(names), os.getpid()), name="rewards"
            )
            self._process.start()
        self._started = time.monotonic()
        self.is_loaded = False
        self._is_usable = True

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process.is_alive()

    @property
    def idle(self) -> bool:
        """Whether it can be given a group; it may still load its rewards."""
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

    async def score(self, group: bytes) -> Scores:
        """The scores of a group that `packed` made; when this is cancelled, the worker must be killed.

        Raises: RewardFailed, WorkerEnded.
        """
        self._is_usable = False
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, _framed(group))
        except ConnectionError:
            raise await self._ended() from None
        reply: Scores | RewardFailed = pickle.loads(await self._message())
        self._is_usable = True
        if isinstance(reply, RewardFailed):
            raise reply
        return reply

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


def packed(names: Sequence[str], episodes: Sequence[Episode]) -> bytes:
    """A group for a worker. Raises: RewardFailed for a task's info that can't be pickled."""
    try:
        return pickle.dumps((tuple(names), tuple(episodes)))
    except Exception as error:  # values of a user's env may raise anything
        raise RewardFailed(
            "reward_error", f"the task's info can't be sent to a worker: {format_error(error)}"
        ) from error


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES) + message


# --- in the worker process --------------------------------------------------------------------------------------------


def _work(server: socket.socket, names: Sequence[str], server_id: int) -> None:
    worker = os.getpid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is meant for the server
    guard_this_process(f"SLIPSTREAM_REWARDS={worker}-{time.time_ns()}", server_id)
    rewards = find_rewards(names)
    server.sendall(_framed(b""))
    # One event loop for all groups: the clients that async rewards keep open belong to it.
    with asyncio.Runner() as runner, server.makefile("rb") as requests:
        while length := requests.read(_LENGTH_BYTES):
            reply = _reply(rewards, requests, int.from_bytes(length), runner)
            if os.getpid() != worker:  # a reward has forked, and its copy returned here
                os._exit(0)
            server.sendall(_framed(pickle.dumps(reply)))


def _reply(
    rewards: Mapping[str, Reward], requests: BinaryIO, size: int, runner: asyncio.Runner
) -> Scores | RewardFailed:
    try:
        names, episodes = pickle.loads(requests.read(size))
    except Exception as error:  # noqa: BLE001  (values of a user's env may raise anything)
        return RewardFailed("reward_error", f"a worker can't read the task's info: {format_error(error)}")
    chosen = [rewards[name] for name in names]
    try:
        # Plain functions run outside of the event loop: they may call asyncio.run themselves.
        scores = score_plain(chosen, episodes)
        if any(reward.is_async for reward in chosen):
            scores |= runner.run(score_async(chosen, episodes))
    except RewardFailed as failure:
        return failure
    return scores
