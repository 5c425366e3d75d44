"""Scores the episodes of a group with the terms of the configuration."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from slipstream.configs.schema.run import RewardConfig, ScoringConfig
from slipstream.rewards.base import Episode, RewardFailed
from slipstream.rewards.compose import EpisodeReward, weighted
from slipstream.rewards.runners.base import InlineRunner, Runner
from slipstream.rewards.runners.pool import PoolRunner


class Scorer:
    """Chooses terms and runner, and gives up groups whose scores would come too late.

    Attributes:
        names: of all terms.
        runner: where they run.
    """

    def __init__(
        self, terms: Sequence[RewardConfig], config: ScoringConfig, *, evaluated: Sequence[RewardConfig] = ()
    ) -> None:
        """`terms` score groups to train on, `evaluated` those of an evaluation.

        Raises: ConfigError if a reward can't be built.
        """
        self._terms = {False: terms, True: evaluated}
        self._deadline_s = config.deadline_s
        known = {term.name: term for term in (*terms, *evaluated)}
        self.names = tuple(known)
        self.runner: Runner = (
            PoolRunner(list(known.values()), workers=config.workers, deadline_s=config.deadline_s)
            if config.workers
            else InlineRunner(list(known.values()), deadline_s=config.deadline_s)
        )
        # Evaluations come as hundreds of tasks at once; they must neither hold up training nor wait behind it.
        slots = self.runner.slots
        self._slots = {True: asyncio.Semaphore(max(1, slots // 2)), False: asyncio.Semaphore(slots)}

    async def score(
        self, episodes: Sequence[Episode], *, until: float | None = None, evaluation: bool = False
    ) -> list[EpisodeReward]:
        """Rewards of a group's episodes.

        Args:
            until: the event loop's time at which the scores lose their use. When the runner can't keep up, groups are
                given up that would hardly be scored by then.
            evaluation: score with the evaluation's terms, on at most half of the slots (at least one).

        Raises: RewardFailed; the scorer stays usable.
        """
        terms = self._terms[evaluation]
        async with self._slot(self._slots[evaluation], until):
            scores = await self.runner.score([term.name for term in terms], episodes)
        return [
            weighted({name: column[index] for name, column in scores.items()}, terms) for index in range(len(episodes))
        ]

    def close(self) -> None:
        """Ends the runner; call it when nobody waits for scores any more."""
        self.runner.close()

    @asynccontextmanager
    async def _slot(self, slots: asyncio.Semaphore, until: float | None) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(None if until is None else self._patience_s(until)):
                await slots.acquire()
        except TimeoutError:
            raise RewardFailed(
                "scoring_timeout",
                "no worker was free before the ticket's deadline; raise scoring.workers, or lower "
                "rollout.groups_in_flight",
            ) from None
        try:
            yield
        finally:
            slots.release()

    def _patience_s(self, until: float) -> float:
        """Longest wait for a slot so that the group is scored by then. Raises: TimeoutError when it is too late."""
        left_s = until - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise TimeoutError
        # The group that waits longest has least time left: without a reserve for its scores every group would come too
        # late. One deadline is for the group that may occupy the worker now.
        return left_s - min(2 * self._deadline_s, left_s / 2)
