"""Scores the episodes of a group with the terms of the configuration."""

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import LogInterval, get_log
from slipstream.configs.runtime.tracing import span
from slipstream.configs.schema.run import RewardConfig, ScoringConfig
from slipstream.rewards.base import Episode, Failure, Result
from slipstream.rewards.compose import OUT_OF_TIME, Call, EpisodeReward, run_all, weighted
from slipstream.rewards.runners.base import InlineRunner, Runner
from slipstream.rewards.runners.pool import PoolRunner

log = get_log("rewards.scorer")

BACKOFF_S: Final = 1.0
"""Mean pause before the second try of a failed call, four times as long before each further one; drawn from half of it
to one and a half times."""
_LONGEST_BACKOFF_S: Final = 30.0
DELIVERY_S: Final = 5.0
"""Time that is left for the delivery of a group, at most a tenth of what scoring had."""


class Scorer:
    """Chooses terms and runner, repeats failed calls, and gives up what would come too late.

    Attributes:
        names: of all terms.
        runner: where they run.
    """

    def __init__(
        self,
        terms: Sequence[RewardConfig],
        config: ScoringConfig,
        *,
        evaluated: Sequence[RewardConfig] = (),
        backoff_s: float | None = BACKOFF_S,
    ) -> None:
        """`terms` score groups to train on, `evaluated` those of an evaluation.

        Args:
            backoff_s: as BACKOFF_S; None: failed calls are not repeated.

        Raises: ConfigError if a reward can't be built.
        """
        self._terms = {False: terms, True: evaluated}
        known = {term.name: term for term in (*terms, *evaluated)}
        self.names = tuple(known)
        self.runner: Runner = (
            PoolRunner(list(known.values()), workers=config.workers, deadline_s=config.deadline_s)
            if config.workers
            else InlineRunner(list(known.values()), deadline_s=config.deadline_s)
        )
        self._deadline_s = config.deadline_s
        self._backoff_s = backoff_s
        self._rates = {name: FailureRate(name) for name in self.names}
        # Evaluations come as hundreds of tasks at once; they must neither hold up training nor wait behind it.
        slots = self.runner.slots
        self._slots = {True: asyncio.Semaphore(max(1, slots // 2)), False: asyncio.Semaphore(slots)}

    def require_time(self, *, generation_s: float, ticket_s: float) -> None:
        """Refuses rewards of which one call may take longer than a slow group's ticket leaves.

        Raises: ConfigError.
        """
        left_s = ticket_s - generation_s - DELIVERY_S
        slow = [
            f"{reward.name} {limit_s:g}"
            for reward in self.runner.rewards.values()
            if (limit_s := reward.worst_case_s or reward.deadline_s) > left_s
        ]
        if slow:
            raise ConfigError(
                f"rewards: one call may take so many seconds: {', '.join(slow)}; buffer.ticket_deadline_s={ticket_s:g} "
                f"leaves {left_s:g} after rollout.group_deadline_s={generation_s:g} and the delivery. Raise "
                "buffer.ticket_deadline_s, or lower scoring.deadline_s or the limits in the rewards' options"
            )

    async def score(
        self, episodes: Sequence[Episode], *, until: float | None = None, evaluation: bool = False
    ) -> list[EpisodeReward | Failure]:
        """Each episode's reward, or the failure of its first term that has no score even after further tries.

        Args:
            until: the event loop's time at which the scores lose their use. When the runner can't keep up, groups are
                given up that would hardly be scored by then.
            evaluation: score with the evaluation's terms, on at most half of the slots (at least one).
        """
        if until is not None:
            until -= min(DELIVERY_S, (until - asyncio.get_running_loop().time()) / 10)
        terms = self._terms[evaluation]
        calls = [call for term in terms for call in self.runner.rewards[term.name].calls(len(episodes))]
        with span("rewards", answers=len(episodes)):
            results = dict(zip(calls, await self._try(calls, episodes, until, evaluation), strict=True))

            async def repeat(call: Call) -> None:
                results[call] = await self._repeated(call, results[call], episodes, until, evaluation)

            await run_all([repeat(call) for call in calls if _failures(results[call])])
        columns: dict[str, dict[int, Result]] = defaultdict(dict)
        for call, column in results.items():
            columns[call.name] |= dict(zip(call.indices, column, strict=True))
        return [self._reward({name: columns[name][index] for name in columns}, terms) for index in range(len(episodes))]

    def close(self) -> None:
        """Ends the runner; call it when nobody waits for scores any more."""
        self.runner.close()

    @staticmethod
    def _reward(results: dict[str, Result], terms: Sequence[RewardConfig]) -> EpisodeReward | Failure:
        scores = {}
        for name, result in results.items():
            if isinstance(result, Failure):
                return result
            scores[name] = result
        return weighted(scores, terms)

    async def _repeated(
        self, call: Call, results: list[Result], episodes: Sequence[Episode], until: float | None, evaluation: bool
    ) -> list[Result]:
        """The results of a failed call after further tries, those with the fewest failures."""
        if self._backoff_s is None:
            return results
        now = asyncio.get_running_loop().time
        for attempt in range(self.runner.rewards[call.name].retries):
            pause_s = min(_LONGEST_BACKOFF_S, self._backoff_s * 4.0**attempt) * random.uniform(0.5, 1.5)
            if until is not None and now() + pause_s >= until:
                break
            await asyncio.sleep(pause_s)
            (again,) = await self._try([call], episodes, until, evaluation)
            if _failures(again) <= _failures(results) and not _is_late(again):
                results = again
            if not _failures(results):
                break
        return results

    async def _try(
        self, calls: Sequence[Call], episodes: Sequence[Episode], until: float | None, evaluation: bool
    ) -> list[list[Result]]:
        """The results of calls, once there is a slot for them."""
        try:
            async with self._slot(self._slots[evaluation], until):
                results = await self.runner.score(calls, episodes, until=until)
        except TimeoutError:
            return [call.failed("scoring_timeout", f"{call.name}: {OUT_OF_TIME}") for call in calls]
        for call, column in zip(calls, results, strict=True):
            self._rates[call.name].record(column)
        return results

    @asynccontextmanager
    async def _slot(self, slots: asyncio.Semaphore, until: float | None) -> AsyncIterator[None]:
        """Raises: TimeoutError."""
        async with asyncio.timeout(None if until is None else self._timeout_s(until)):
            await slots.acquire()
        try:
            yield
        finally:
            slots.release()

    def _timeout_s(self, until: float) -> float:
        """Longest wait for a slot so that the group is scored by then. Raises: TimeoutError when it is too late."""
        left_s = until - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise TimeoutError
        # The group that waits longest has least time left: without a reserve for its scores every group would come too
        # late. One limit is for the call that may occupy the worker now.
        return left_s - min(2 * self._deadline_s, left_s / 2)


class FailureRate:
    """Warns when a reward fails often."""

    _LAST: Final = 200
    """Scores that are looked at, at least half of them."""
    _BOUND: Final = 0.2
    _EVERY_S: Final = 60.0

    def __init__(self, name: str) -> None:
        """Of the reward `name`."""
        self._name = name
        self._failed = deque[bool](maxlen=self._LAST)
        self._warned = LogInterval(self._EVERY_S)

    def record(self, results: Sequence[Result]) -> None:
        """Counts the results of a call, further tries too."""
        failures = [result for result in results if isinstance(result, Failure)]
        self._failed.extend(isinstance(result, Failure) for result in results)
        scores, failed = len(self._failed), sum(self._failed)
        if failures and scores >= self._LAST // 2 and failed > self._BOUND * scores and self._warned.due():
            why = failures[-1]
            log.warning(
                "reward fails often",
                reward=self._name,
                failed=failed,
                scores=scores,
                reason=why.reason,
                detail=why.detail,
            )


def _failures(results: Sequence[Result]) -> int:
    return sum(isinstance(result, Failure) for result in results)


def _is_late(results: Sequence[Result]) -> bool:
    """True if a call had no time left: the reason of the try before says more."""
    return all(isinstance(result, Failure) and result.reason == "scoring_timeout" for result in results)
