"""Runs rewards in worker processes: plain ones a group at a time, killed at its deadline; async ones in a shared one.

Each worker has its own socket and can be killed at any time. In the pools of libraries workers share a pipe and a lock,
so that one worker that is stuck in C code, or crashes while it holds them, blocks all others.
"""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from slipstream.configs.runtime.threads import run_in_thread
from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import Episode, RewardFailed
from slipstream.rewards.compose import Reward, Scores, run_all, score_plain
from slipstream.rewards.registry import find_rewards
from slipstream.rewards.runners.base import close_rewards, late, load_in_worker, start_worker
from slipstream.rewards.runners.messages import (
    LENGTH_BYTES,
    START_S,
    WorkerEnded,
    decode_reply,
    decode_request,
    encode_failure,
    encode_request,
    encode_scores,
    framed,
)
from slipstream.rewards.runners.shared import GROUPS, SharedWorker

_PIECE_BYTES = 1 << 20
_REAP_S = 5.0  # how long the kernel may take to end a process


class Worker:
    """The parent's handle of a worker process.

    Attributes:
        is_loaded: whether it has reported that its rewards are loaded.
    """

    def __init__(self, terms: Sequence[RewardConfig]) -> None:
        """Starts the process, with the rewards of these terms."""
        self._socket, self._process = start_worker(_work, terms)
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
        group = encode_request(names, episodes)
        self._is_usable = False
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, framed(group))
        except ConnectionError:
            raise await self._ended() from None
        message = await self._message()
        try:
            scores = decode_reply(message, names, len(episodes))
        except RewardFailed:
            self._is_usable = True
            raise
        self._is_usable = True
        return scores

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
                    return self._socket.recv(LENGTH_BYTES)
                await readable.wait()
        finally:
            loop.remove_reader(self._socket)

    async def _message(self) -> bytes:
        return await self._read(int.from_bytes(await self._read(LENGTH_BYTES)))

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


class PoolRunner:
    """Worker processes that are started when they are needed.

    Up to `workers` score plain rewards, one group at a time each. One scores the async rewards of many groups at once.
    """

    def __init__(self, terms: Sequence[RewardConfig], *, workers: int, deadline_s: float) -> None:
        """Rewards are built here, to fail at start, and once in each worker; a group has `deadline_s` in a worker.

        Raises: ConfigError if a reward can't be built.
        """
        self._rewards = find_rewards(terms)
        self._plain = tuple(term for term in terms if not self._rewards[term.name].is_async)
        self._async = tuple(term for term in terms if self._rewards[term.name].is_async)
        self.slots = GROUPS if self._async else workers
        self._deadline_s = deadline_s
        self._workers: set[Worker] = set()
        """Killed ones stay until their processes have ended."""
        self._idle: list[Worker] = []
        self._free = asyncio.Semaphore(workers)
        self._shared: list[SharedWorker] = []
        """The last one takes groups; retired ones finish theirs."""

    async def score(self, names: Sequence[str], episodes: Sequence[Episode]) -> Scores:
        """As the protocol has it. Raises: RewardFailed."""
        plain = [name for name in names if not self._rewards[name].is_async]
        others = [name for name in names if self._rewards[name].is_async]
        calls = [self._score_plain(plain, episodes)] if plain else []
        calls += [self._score_async(others, episodes)] if others else []
        found: Scores = {name: column for scores in await run_all(calls) for name, column in scores.items()}
        return {name: found[name] for name in names}

    async def _score_plain(self, names: Sequence[str], episodes: Sequence[Episode]) -> Scores:
        async with self._worker() as worker:
            missed = _not_loaded(self._plain)
            try:
                await worker.loaded(START_S)
                missed = late(names, self._deadline_s)
                async with asyncio.timeout(self._deadline_s):
                    return await worker.score(names, episodes)
            except TimeoutError:
                raise missed from None
            except WorkerEnded as error:
                raise _crashed(self._plain, error) from None

    async def _score_async(self, names: Sequence[str], episodes: Sequence[Episode]) -> Scores:
        shared = self._take_shared()
        try:
            await shared.loaded(START_S)
            return await shared.score(names, episodes)
        except TimeoutError:
            raise _not_loaded(self._async) from None
        except WorkerEnded as error:
            raise _crashed(self._async, error) from None

    def close(self) -> None:
        """Kills the workers; call it when nobody waits for scores any more."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.reap()
        self._workers.clear()
        self._idle.clear()
        for shared in self._shared:
            shared.close()
        self._shared.clear()
        close_rewards(self._rewards.values())

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

    def _take_shared(self) -> SharedWorker:
        for ended in [worker for worker in self._shared if worker.ended]:
            ended.close()
            self._shared.remove(ended)
        if not self._shared or self._shared[-1].retired:
            try:
                self._shared.append(SharedWorker(self._async, deadline_s=self._deadline_s))
            except OSError as error:
                raise _crashed(self._async, error) from error
        return self._shared[-1]

    def _take(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.idle:
                return worker
            worker.kill()  # it ended since its last group, by no fault of this one
        self._workers = {worker for worker in self._workers if worker.alive}
        try:
            worker = Worker(self._plain)
        except OSError as error:
            raise _crashed(self._plain, error) from error
        self._workers.add(worker)
        return worker


def _not_loaded(terms: Sequence[RewardConfig]) -> RewardFailed:
    why = f"no worker has loaded it within {START_S:g} s; load slow things in the first call"
    return RewardFailed("reward_timeout", f"{_listed(terms)}: {why}")


def _crashed(terms: Sequence[RewardConfig], error: Exception) -> RewardFailed:
    return RewardFailed("reward_crash", f"{_listed(terms)}: {error}")


def _listed(terms: Sequence[RewardConfig]) -> str:
    return ", ".join(term.name for term in terms)


# --- in the worker process --------------------------------------------------------------------------------------------


def _work(server: socket.socket, terms: Sequence[RewardConfig], server_id: int) -> None:
    worker = os.getpid()
    rewards = load_in_worker(terms, server_id)
    server.sendall(framed(b""))
    with server.makefile("rb") as requests:
        while length := requests.read(LENGTH_BYTES):
            reply = _reply(rewards, requests.read(int.from_bytes(length)))
            if os.getpid() != worker:  # a reward has forked, and its copy returned here
                os._exit(0)
            server.sendall(framed(reply))


def _reply(rewards: Mapping[str, Reward], request: bytes) -> bytes:
    try:
        group = decode_request(request)
        return encode_scores(score_plain([rewards[name] for name in group.names], group.episodes))
    except RewardFailed as failed:
        return encode_failure(failed)
