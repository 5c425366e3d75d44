"""Scores groups, inline or in worker processes that are killed when they take too long."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from slipstream.configs.schema import RunConfig
from slipstream.rewards.base import RewardFailed
from slipstream.rewards.compose import score_answers
from slipstream.rewards.registry import find_rewards
from slipstream.rewards.runners.worker import Scores, Worker, WorkerEnded, packed

_START_S = 90.0  # a worker's interpreter and the plug-ins' imports


class Scorer:
    """Scores the answers of a group with the configured rewards.

    Args:
        names: the rewards that `score` may be asked for.
        workers: most worker processes; 0 scores in this process and thread, without a deadline.
        deadline_s: time for one group, from when a worker takes it.

    Names are resolved here, to fail at start, and once in each worker.

    Raises: ConfigError if a name can't be resolved.
    """

    def __init__(self, names: Sequence[str], *, workers: int, deadline_s: float) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._rewards = find_rewards(self._names)
        self._most_workers = workers
        self._deadline_s = deadline_s
        self._workers: set[Worker] = set()
        """Those that were killed stay until they are seen to have ended."""
        self._idle: list[Worker] = []
        self._free = asyncio.Semaphore(workers)
        # Evaluations, which come as hundreds of tasks at once, must not hold up training, nor wait behind it.
        self._slots = {True: asyncio.Semaphore(max(1, workers // 2)), False: asyncio.Semaphore(max(1, workers))}

    @classmethod
    def from_config(cls, config: RunConfig) -> "Scorer":
        """The scorer of a run: for its reward terms, and the evaluation's."""
        evaluated = config.evaluated if config.eval.tasks else ()
        return cls(
            [term.name for term in (*config.rewards, *evaluated)],
            workers=config.scoring.workers,
            deadline_s=config.scoring.deadline_s,
        )

    async def score(
        self,
        answers: Sequence[str],
        reference: str,
        info: Mapping[str, Any],
        *,
        names: Sequence[str],
        until: float | None = None,
        evaluation: bool = False,
    ) -> Scores:
        """One dict from reward name to score for each answer.

        Args:
            names: the rewards to score with.
            until: the event loop's time from which on nobody wants the scores. When workers can't keep up, those groups
                are given up that would hardly be scored by then.
            evaluation: the group is scored beside those to train on, by at most half of the workers (at least one).

        Raises: RewardFailed; the scorer stays usable. KeyError for a name that the scorer was not made with.
        """
        rewards = {name: self._rewards[name] for name in names}
        async with self._slot(self._slots[evaluation], until):
            if self._most_workers == 0:
                return score_answers(rewards, answers, reference, info)
            group = packed(names, answers, reference, info)
            async with self._worker() as worker:
                return await self._score(worker, group)

    def close(self) -> None:
        """Ends the workers, whatever they are at; call it when nobody waits for scores any more."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.reap()
        self._workers.clear()
        self._idle.clear()

    @asynccontextmanager
    async def _slot(self, slots: asyncio.Semaphore, until: float | None) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(None if until is None else self._patience_s(until)):
                await slots.acquire()
        except TimeoutError:
            raise RewardFailed(
                "scoring_timeout",
                "no worker was free in time for the ticket's deadline; raise scoring.workers, or lower "
                "rollout.groups_in_flight",
            ) from None
        try:
            yield
        finally:
            slots.release()

    def _patience_s(self, until: float) -> float:
        """How long a group may wait for a slot, to be scored by then. Raises: TimeoutError when it is too late."""
        left_s = until - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise TimeoutError
        # Whoever waits longest has least time left: without time for the scores, all of them would come too late. One
        # deadline is for the group that a worker may still be at.
        return left_s - min(2 * self._deadline_s, left_s / 2)

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[Worker]:
        """A worker for one group; one that is not done with it is killed, unless it has yet to load its rewards."""
        async with self._free:
            worker = self._take()
            try:
                yield worker
            finally:
                if worker.idle:
                    # Those that are loaded are taken first, which is from the end.
                    self._idle.insert(len(self._idle) if worker.is_loaded else 0, worker)
                else:
                    worker.kill()

    def _take(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.idle:
                return worker
            worker.kill()  # it has ended meanwhile, for no fault of this group
        self._workers = {worker for worker in self._workers if worker.alive}
        try:
            worker = Worker(self._names)
        except OSError as error:
            raise RewardFailed("reward_crash", f"{self._listed}: no worker process can be started: {error}") from error
        self._workers.add(worker)
        return worker

    async def _score(self, worker: Worker, group: bytes) -> Scores:
        missed = f"no worker has loaded it within {_START_S:g} s; let its first call load what takes so long"
        try:
            await worker.loaded(_START_S)
            missed = f"no scores within scoring.deadline_s={self._deadline_s:g}"
            async with asyncio.timeout(self._deadline_s):
                return await worker.score(group)
        except TimeoutError:
            raise RewardFailed("reward_timeout", f"{self._listed}: {missed}") from None
        except WorkerEnded as error:
            raise RewardFailed("reward_crash", f"{self._listed}: {error}") from None

    @property
    def _listed(self) -> str:
        return ", ".join(self._names)
