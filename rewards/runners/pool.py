"""Runs rewards in worker processes: plain ones a group at a time, killed when a call hangs; async ones in a shared one.

Each worker has its own socket and can be killed at any time. In the pools of libraries workers share a pipe and a lock,
so that one worker that is stuck in C code, or crashes while it holds them, blocks all others.
"""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from slipstream.configs.runtime.threads import run_in_thread
from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import Episode, Result
from slipstream.rewards.compose import OUT_OF_TIME, Call, Reward, run_all
from slipstream.rewards.registry import find_rewards
from slipstream.rewards.runners.base import (
    LENGTH_BYTES,
    START_S,
    UnreadableInfo,
    WorkerEnded,
    call_span,
    chosen,
    close_rewards,
    decode_reply,
    decode_request,
    encode_error,
    encode_reply,
    encode_request,
    framed,
    load_in_worker,
    start_worker,
)
from slipstream.rewards.runners.shared import GROUPS, SharedWorker

_PIECE_BYTES = 1 << 20
_REAP_S = 5.0  # how long the kernel may take to end a process


class Worker:
    """The parent's handle of a worker process.

    Attributes:
        is_loaded: whether it has reported that its rewards are loaded.
    """

    def __init__(self, terms: Sequence[RewardConfig], *, deadline_s: float) -> None:
        """Starts the process, with the rewards of these terms."""
        self._socket, self._process = start_worker(_work, terms, deadline_s)
        self._received = bytearray()
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

    async def score(
        self, calls: Sequence[Call], episodes: Sequence[Episode], limits_s: Sequence[float], done: list[list[Result]]
    ) -> None:
        """Appends the results of each call to `done` as they come; if that fails or is cancelled, kill the worker.

        Raises: TimeoutError when the call that is next in `done` exceeds its limit; WorkerEnded, UnreadableInfo.
        """
        request, loop = encode_request(calls, episodes), asyncio.get_running_loop()
        self._is_usable = False
        async with asyncio.timeout(limits_s[0]) as limit:
            try:
                await loop.sock_sendall(self._socket, framed(request))
            except ConnectionError:
                raise await self._ended() from None
            for call, limit_s in zip(calls, limits_s, strict=True):
                limit.reschedule(loop.time() + limit_s)
                try:
                    with call_span(call):
                        done.append(decode_reply(await self._message(), len(call.indices)))
                except UnreadableInfo:
                    self._is_usable = True
                    raise
        self._is_usable = True

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
        while len(self._received) < size:
            try:
                piece = await asyncio.get_running_loop().sock_recv(self._socket, _PIECE_BYTES)
            except ConnectionError:
                piece = b""
            if not piece:
                raise await self._ended()
            self._received += piece
        read = bytes(self._received[:size])
        del self._received[:size]
        return read

    async def _ended(self) -> WorkerEnded:
        await run_in_thread(self.reap)
        return WorkerEnded(f"the worker process ended with exit code {self._process.exitcode}")


class PoolRunner:
    """Worker processes that are started when they are needed.

    Up to `workers` score plain rewards, one group at a time each. One scores the async rewards of many groups at once.
    """

    def __init__(self, terms: Sequence[RewardConfig], *, workers: int, deadline_s: float) -> None:
        """Rewards are built here, to fail at start, and once in each worker.

        Raises: ConfigError if a reward can't be built.
        """
        self.rewards: Mapping[str, Reward] = find_rewards(terms, deadline_s=deadline_s)
        self._plain = tuple(term for term in terms if not self.rewards[term.name].is_async)
        self._async = tuple(term for term in terms if self.rewards[term.name].is_async)
        self.slots = GROUPS if self._async else workers
        self._deadline_s = deadline_s
        self._workers: set[Worker] = set()
        """Killed ones stay until their processes have ended."""
        self._idle: list[Worker] = []
        self._free = asyncio.Semaphore(workers)
        self._shared: list[SharedWorker] = []
        """The last one takes calls; retired ones finish theirs."""

    async def score(
        self, calls: Sequence[Call], episodes: Sequence[Episode], *, until: float | None = None
    ) -> list[list[Result]]:
        """The results of these calls in worker processes; what has none at `until` fails."""
        plain = [call for call in calls if not self.rewards[call.name].is_async]
        others = [call for call in calls if self.rewards[call.name].is_async]
        found: dict[Call, list[Result]] = {}

        async def score_plain() -> None:
            done: list[list[Result]] = []
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._score_plain(plain, episodes, done)
            found.update(zip(plain, done, strict=False))

        async def score_async(call: Call) -> None:
            slot = self.rewards[call.name].slot(len(call.indices), until=until)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until), slot:
                    found[call] = await self._score_async(call, chosen(call, episodes))

        await run_all([*map(score_async, others), *([score_plain()] if plain else [])])
        return [found.get(call) or call.failed("scoring_timeout", f"{call.name}: {OUT_OF_TIME}") for call in calls]

    async def _score_plain(self, calls: Sequence[Call], episodes: Sequence[Episode], done: list[list[Result]]) -> None:
        """Appends the results of each call. One that hangs or ends its worker fails; another worker has the rest."""
        while left := calls[len(done) :]:
            try:
                async with self._worker() as worker:
                    await worker.loaded(START_S)
                    await self._run(worker, left, episodes, done)
            except UnreadableInfo as error:
                done += [call.failed("reward_error", f"{call.name}: {error}") for call in left]
            except TimeoutError:
                done += [call.failed("reward_timeout", _not_loaded(self._plain)) for call in left]
            except (WorkerEnded, OSError) as error:
                done += [call.failed("reward_crash", f"{_listed(self._plain)}: {error}") for call in left]

    async def _run(
        self, worker: Worker, calls: Sequence[Call], episodes: Sequence[Episode], done: list[list[Result]]
    ) -> None:
        """Appends the results of calls up to the first that hangs or ends the worker. Raises: UnreadableInfo."""
        rewards, before = [self.rewards[call.name] for call in calls], len(done)
        limits_s = [reward.limit_s(len(call.indices)) for reward, call in zip(rewards, calls, strict=True)]
        try:
            await worker.score(calls, episodes, limits_s, done)
        except TimeoutError:
            number = len(done) - before
            done.append([rewards[number].late(limits_s[number])] * len(calls[number].indices))
        except WorkerEnded as error:
            call = calls[len(done) - before]
            done.append(call.failed("reward_crash", f"{call.name}: {error}"))

    async def _score_async(self, call: Call, episodes: Sequence[Episode]) -> list[Result]:
        try:
            shared = self._take_shared()
            await shared.loaded(START_S)
            with call_span(call):
                return await shared.score(self.rewards[call.name], episodes)
        except UnreadableInfo as error:
            return call.failed("reward_error", f"{call.name}: {error}")
        except TimeoutError:
            return call.failed("reward_timeout", _not_loaded(self._async))
        except (WorkerEnded, OSError) as error:
            return call.failed("reward_crash", f"{_listed(self._async)}: {error}")

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
        close_rewards(self.rewards.values())

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
        """Raises: OSError."""
        for ended in [worker for worker in self._shared if worker.ended]:
            ended.close()
            self._shared.remove(ended)
        if not self._shared or self._shared[-1].retired:
            self._shared.append(SharedWorker(self._async, deadline_s=self._deadline_s))
        return self._shared[-1]

    def _take(self) -> Worker:
        """Raises: OSError."""
        while self._idle:
            worker = self._idle.pop()
            if worker.idle:
                return worker
            worker.kill()  # it ended since its last group, by no fault of this one
        self._workers = {worker for worker in self._workers if worker.alive}
        worker = Worker(self._plain, deadline_s=self._deadline_s)
        self._workers.add(worker)
        return worker


def _not_loaded(terms: Sequence[RewardConfig]) -> str:
    return f"{_listed(terms)}: no worker has loaded it within {START_S:g} s; load slow things in the first call"


def _listed(terms: Sequence[RewardConfig]) -> str:
    return ", ".join(term.name for term in terms)


# --- in the worker process --------------------------------------------------------------------------------------------


def _work(server: socket.socket, terms: Sequence[RewardConfig], deadline_s: float, server_id: int) -> None:
    worker = os.getpid()
    rewards = load_in_worker(terms, deadline_s, server_id)
    server.sendall(framed(b""))
    with server.makefile("rb") as requests:
        while length := requests.read(LENGTH_BYTES):
            for reply in _replies(rewards, requests.read(int.from_bytes(length))):
                if os.getpid() != worker:  # a reward has forked, and its copy returned here
                    os._exit(0)
                server.sendall(framed(reply))


def _replies(rewards: Mapping[str, Reward], message: bytes) -> Iterator[bytes]:
    try:
        request = decode_request(message)
    except UnreadableInfo as error:
        yield encode_error(error)
        return
    for call in request.calls:
        yield encode_reply(rewards[call.name].run(chosen(call, request.episodes)))
