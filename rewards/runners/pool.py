"""Runs rewards in worker processes, which are killed at a group's deadline."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from slipstream.rewards.base import Episode, RewardFailed
from slipstream.rewards.compose import Scores
from slipstream.rewards.registry import find_rewards
from slipstream.rewards.runners.base import late
from slipstream.rewards.runners.worker import Worker, WorkerEnded, packed

_START_S = 90.0  # a worker's interpreter and the plug-ins' imports


class PoolRunner:
    """Worker processes that are started when they are needed, up to `workers`; each scores one group at a time."""

    def __init__(self, names: Sequence[str], *, workers: int, deadline_s: float) -> None:
        """Names are resolved here, to fail at start, and once in each worker; a group has `deadline_s` in a worker.

        Raises: ConfigError if a name can't be resolved.
        """
        self._names = tuple(names)
        find_rewards(names)
        self.slots = workers
        self._deadline_s = deadline_s
        self._workers: set[Worker] = set()
        """Killed ones stay until their processes have ended."""
        self._idle: list[Worker] = []
        self._free = asyncio.Semaphore(workers)

    async def score(self, names: Sequence[str], episodes: Sequence[Episode]) -> Scores:
        """As the protocol has it. Raises: RewardFailed."""
        group = packed(names, episodes)
        async with self._worker() as worker:
            missed = RewardFailed(
                "reward_timeout",
                f"{self._listed}: no worker has loaded it within {_START_S:g} s; load slow things in the first call",
            )
            try:
                await worker.loaded(_START_S)
                missed = late(names, self._deadline_s)
                async with asyncio.timeout(self._deadline_s):
                    return await worker.score(group)
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
            worker = Worker(self._names)
        except OSError as error:
            raise RewardFailed("reward_crash", f"{self._listed}: no worker process can be started: {error}") from error
        self._workers.add(worker)
        return worker

    @property
    def _listed(self) -> str:
        return ", ".join(self._names)
