"""A worker process: it loads the rewards once, and scores one group after the other.

Each has a socket of its own, and is killed at a deadline. In the pools of libraries workers share a pipe and a lock, so
that one which is stuck in C code, or dies while it holds them, holds up all others.
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
from typing import Any, BinaryIO

from slipstream.configs.runtime.errors import SlipstreamError, format_error
from slipstream.configs.runtime.processes import guard_this_process
from slipstream.configs.runtime.threads import run_in_thread
from slipstream.rewards.base import Reward, RewardFailed
from slipstream.rewards.compose import score_answers
from slipstream.rewards.registry import find_rewards

Scores = list[dict[str, float]]

_LENGTH_BYTES = 8  # before each message
_PIECE_BYTES = 1 << 20
_REAP_S = 5.0  # how long the kernel may take to end a process


class WorkerEnded(SlipstreamError):
    """The process has ended."""


class Worker:
    """A worker process, asked for one group at a time."""

    def __init__(self, names: Sequence[str]) -> None:
        """Starts it, with the rewards of these names."""
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
        """Whether it has said that it can score."""
        self._is_usable = True

    @property
    def alive(self) -> bool:
        """Whether its process has not ended; once it has, nothing is left of it."""
        return self._process.is_alive()

    @property
    def idle(self) -> bool:
        """Whether it lives and can be given a group; it may still be loading."""
        return self._is_usable and self.alive

    async def loaded(self, within_s: float) -> None:
        """Returns once its rewards are loaded. Who gives that up leaves a worker that goes on loading.

        Raises: WorkerEnded; TimeoutError when it was started `within_s` ago, and then it must be killed.
        """
        if self.is_loaded:
            return
        try:
            async with asyncio.timeout(self._started + within_s - time.monotonic()):
                first_word = await self._first_word()
        except TimeoutError:
            self._is_usable = False
            raise
        if not first_word:
            raise await self._ended()
        self.is_loaded = True

    async def score(self, group: bytes) -> Scores:
        """The scores of a group that `packed` made. One that is given up leaves a worker that must be killed.

        Raises: RewardFailed, WorkerEnded.
        """
        self._is_usable = False
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, _framed(group))
        except ConnectionError:
            raise await self._ended() from None
        answer: Scores | RewardFailed = pickle.loads(await self._message())
        self._is_usable = True
        if isinstance(answer, RewardFailed):
            raise answer
        return answer

    def kill(self) -> None:
        """Ends it, whatever it is at; what its rewards have started ends too, by its guard."""
        self._process.kill()
        self._socket.close()

    def reap(self) -> None:
        """Waits for its end."""
        self._process.join(_REAP_S)

    async def _first_word(self) -> bytes:
        """What it says once it is loaded; empty if it has ended. `sock_recv` would lose it when it is cancelled."""
        loop, there = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._socket, there.set)
        try:
            while True:
                with suppress(BlockingIOError):
                    return self._socket.recv(_LENGTH_BYTES)
                await there.wait()
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


def packed(names: Sequence[str], answers: Sequence[str], reference: str, info: Mapping[str, Any]) -> bytes:
    """A group for a worker. Raises: RewardFailed for info that can't be sent."""
    try:
        return pickle.dumps((tuple(names), tuple(answers), reference, dict(info)))
    except Exception as error:  # whatever the values of a user's env raise
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
    with server.makefile("rb") as questions:
        while length := questions.read(_LENGTH_BYTES):
            answer = _answer(rewards, questions, int.from_bytes(length))
            if os.getpid() != worker:  # a copy that a reward has made by a fork, and let return
                os._exit(0)
            server.sendall(_framed(pickle.dumps(answer)))


def _answer(rewards: Mapping[str, Reward], questions: BinaryIO, size: int) -> Scores | RewardFailed:
    try:
        names, answers, reference, info = pickle.loads(questions.read(size))
    except Exception as error:  # noqa: BLE001  (whatever the values of a user's env raise)
        return RewardFailed("reward_error", f"a worker can't read the task's info: {format_error(error)}")
    try:
        return score_answers({name: rewards[name] for name in names}, answers, reference, info)
    except RewardFailed as failure:
        return failure
