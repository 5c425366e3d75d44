"""Scores groups, inline or in worker processes that are killed when they take too long."""

import asyncio
import os
import pickle
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from multiprocessing import get_context
from typing import Any

from pebble import ProcessExpired, ProcessPool

from slipstream.configs.guard import guard_this_process
from slipstream.configs.plugins import said
from slipstream.configs.schema import RunConfig
from slipstream.rewards.base import Reward, RewardFailed
from slipstream.rewards.compose import score_answers
from slipstream.rewards.registry import find_rewards

_START_S = 60.0  # a worker's interpreter and the plug-ins' imports
_GROUPS_PER_WORKER = 2  # one is scored, one waits at the worker's door
_POOLS = 4  # that may break under a group before it is the one to blame

Scores = list[dict[str, float]]


class Scorer:
    """Scores the answers of a group with the configured rewards.

    Args:
        names: the rewards that `score` may be asked for.
        workers: worker processes; 0 scores in this process and thread, without a deadline.
        deadline_s: time for one group, from when a worker takes it.

    Names are resolved here, to fail at start, and once in each worker.

    Raises: ConfigError if a name can't be resolved.
    """

    def __init__(self, names: Sequence[str], *, workers: int, deadline_s: float) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._rewards = find_rewards(self._names)
        self._workers = workers
        self._deadline_s = deadline_s
        self._pool = self._new_pool() if workers else None
        # pebble forgets the tasks still in its own queue when the pool breaks, so none may wait there.
        # And evaluations, which come as hundreds of tasks at once, must not hold up training, nor wait behind it.
        evaluations = max(1, workers // 2)
        self._slots = {
            True: asyncio.Semaphore(evaluations),
            False: asyncio.Semaphore(max(1, workers * _GROUPS_PER_WORKER - evaluations)),
        }

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
        async with self._slot(self._slots[evaluation], until):
            if self._workers == 0:
                return score_answers({name: self._rewards[name] for name in names}, answers, reference, info)
            return await self._score_in_worker(_pickled(tuple(names), tuple(answers), reference, info))

    def close(self) -> None:
        """Stops the workers, whatever they are at; call it when nobody waits for scores any more."""
        if self._pool is not None:
            _stop(self._pool)
            self._pool = None

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
        """How long a group may wait for a worker, to be scored by then. Raises: TimeoutError when it is too late."""
        left_s = until - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise TimeoutError
        # Whoever waits longest has least time left: without time for the scores, all of them would come too late.
        return left_s - min(_GROUPS_PER_WORKER * self._deadline_s, left_s / 2)

    async def _score_in_worker(self, group: bytes) -> Scores:
        # A worker that dies at an unlucky moment breaks the pool under innocent groups: they try another one.
        for _ in range(_POOLS):
            pool = self._pool
            assert pool is not None, "score() after close()"
            try:
                return await self._submit(pool, group)
            except ProcessExpired as error:
                raise RewardFailed(
                    "reward_crash",
                    f"{self._listed}: the worker process ended with exit code {error.exitcode}",
                ) from None
            except RuntimeError:  # pebble's word for a broken pool; BrokenProcessPool is one too
                await self._replace(pool)
        raise RewardFailed("reward_crash", f"{self._listed}: the worker processes died {_POOLS} times")

    async def _submit(self, pool: ProcessPool, group: bytes) -> Scores:
        # The pool's own deadline starts when a worker takes the group; this one also covers that none does.
        patience_s = _START_S + _GROUPS_PER_WORKER * self._deadline_s
        try:
            async with asyncio.timeout(patience_s) as patience:
                future = pool.schedule(_score_loaded, args=(group,), timeout=self._deadline_s)
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if patience.expired():
                await self._replace(pool)
                raise RewardFailed(
                    "reward_timeout",
                    f"{self._listed}: no worker took the group within {patience_s:g} s; if it takes so long to import "
                    "the reward, let its first call load what it needs",
                ) from None
            raise RewardFailed(
                "reward_timeout", f"{self._listed}: no scores within scoring.deadline_s={self._deadline_s:g}"
            ) from None

    async def _replace(self, broken: ProcessPool) -> None:
        if self._pool is broken:  # and not already replaced on behalf of another group
            self._pool = self._new_pool()
            await asyncio.to_thread(_stop, broken)

    def _new_pool(self) -> ProcessPool:
        # spawn: a fork would copy the engine's threads and locks.
        return ProcessPool(
            max_workers=self._workers,
            initializer=_load,
            initargs=(self._names, os.getpid()),
            context=get_context("spawn"),
        )

    @property
    def _listed(self) -> str:
        return ", ".join(self._names)


def _pickled(names: Sequence[str], answers: Sequence[str], reference: str, info: Mapping[str, Any]) -> bytes:
    """What a worker is sent. Not left to pebble, whose thread would die of an error that it does not expect."""
    try:
        return pickle.dumps((names, answers, reference, dict(info)))
    except Exception as error:  # whatever the values of a user's env raise
        raise RewardFailed("reward_error", f"the task's info can't be sent to a worker: {said(error)}") from error


def _stop(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]  # pebble annotates all but this one
    pool.join()


# What follows runs in the worker processes.

_loaded: dict[str, Reward] = {}


def _load(names: Sequence[str], server: int) -> None:
    # pebble kills a worker that takes too long, but not what its rewards have started.
    guard_this_process(f"SLIPSTREAM_REWARDS={os.getpid()}-{time.time_ns()}", server)
    _loaded.update(find_rewards(names))


def _score_loaded(group: bytes) -> Scores:
    try:
        names, answers, reference, info = pickle.loads(group)
    except Exception as error:  # whatever the values of a user's env raise
        raise RewardFailed("reward_error", f"a worker can't read the task's info: {said(error)}") from error
    return score_answers({name: _loaded[name] for name in names}, answers, reference, info)
