"""Calls reward functions on the episodes of a group, checks their results, and sums them by weight."""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from slipstream.configs.runtime.errors import format_error
from slipstream.configs.runtime.sandbox import SandboxUnavailable
from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import Episode, RewardFailed, RewardUnavailable, Score

LARGEST_SCORE = 1e6
"""Sums of squares of larger ones are infinite in the float32 of the learner, which would skip every update."""
_LONGEST_DETAIL = 500  # characters: a user's message ends up in counters and logs

Takes = Literal["answer", "episode", "group"]
Scores = dict[str, list[Score]]
"""By reward name, one score for each episode."""


@dataclass(frozen=True)
class Reward:
    """A reward function, and how it is called.

    Attributes:
        takes: `answer` (answer, reference, info), `episode` (one Episode) or `group` (all Episodes).
        is_async: whether its result must be awaited.
    """

    name: str
    function: Callable[..., Any]
    takes: Takes
    is_async: bool

    def score(self, episodes: Sequence[Episode]) -> list[Score]:
        """One score for each episode, by a plain function. Raises: RewardFailed."""
        with self._errors():
            if self.takes == "group":
                return _checked_group(self.function(list(episodes)), episodes)
            return [_checked(self._call(episode), episode) for episode in episodes]

    async def score_async(self, episodes: Sequence[Episode]) -> list[Score]:
        """One score for each episode, concurrently, by an async function. Raises: RewardFailed."""
        if self.takes == "group":
            with self._errors():
                return _checked_group(await self.function(list(episodes)), episodes)
        return await run_all([self._score_one(episode) for episode in episodes])

    async def _score_one(self, episode: Episode) -> Score:
        with self._errors():
            return _checked(await self._call(episode), episode)

    def _call(self, episode: Episode) -> Any:
        if self.takes == "episode":
            return self.function(episode)
        return self.function(episode.answer, episode.reference, episode.info)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RewardFailed:  # of another reward, which this one has called
            raise
        except BaseException as error:  # user code may raise anything, such as a SystemExit or a panic of Rust
            # A KeyboardInterrupt is the reward's own; a CancelledError is, unless this task is being cancelled.
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            lacks = isinstance(error, RewardUnavailable | SandboxUnavailable)
            detail = f"{self.name}: {format_error(error)}"[:_LONGEST_DETAIL]
            raise RewardFailed("reward_unavailable" if lacks else "reward_error", detail) from error


def score_plain(rewards: Sequence[Reward], episodes: Sequence[Episode]) -> Scores:
    """The scores of those rewards that need no event loop. Raises: RewardFailed."""
    return {reward.name: reward.score(episodes) for reward in rewards if not reward.is_async}


async def score_async(rewards: Sequence[Reward], episodes: Sequence[Episode]) -> Scores:
    """The scores of the async rewards, all at once. Raises: RewardFailed."""
    chosen = [reward for reward in rewards if reward.is_async]
    columns = await run_all([reward.score_async(episodes) for reward in chosen])
    return {reward.name: column for reward, column in zip(chosen, columns, strict=True)}


@dataclass(frozen=True)
class EpisodeReward:
    """The reward of one episode.

    Attributes:
        reward: the weighted sum.
        scores: each term before weighting, its parts as `<term>/<part>`.
        spans: (end, value) of the terms that have spans, weighted; the rest of `reward` is at the end.
    """

    reward: float
    scores: dict[str, float]
    spans: list[tuple[int, float]]


def weighted(scores: Mapping[str, Score], terms: Sequence[RewardConfig]) -> EpisodeReward:
    """The sum of weight times value over `terms`; scores that no term names are recorded only.

    Raises: KeyError if a term has no score.
    """
    recorded = {name: score.value for name, score in scores.items()}
    recorded |= {f"{name}/{part}": value for name, score in scores.items() for part, value in score.parts.items()}
    return EpisodeReward(
        reward=math.fsum(term.weight * scores[term.name].value for term in terms),
        scores=recorded,
        spans=[(end, term.weight * value) for term in terms for end, value in scores[term.name].spans],
    )


async def run_all(calls: Sequence[Any]) -> list[Any]:
    """Results of coroutines that run at once. Raises: the first RewardFailed; the others are cancelled then."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call) for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in running]


def _checked_group(results: object, episodes: Sequence[Episode]) -> list[Score]:
    if not isinstance(results, Sequence) or len(results) != len(episodes):
        raise TypeError(f"returned {repr(results)[:100]}, which is no sequence of {len(episodes)} scores")
    return [_checked(result, episode) for result, episode in zip(results, episodes, strict=True)]


def _checked(result: object, episode: Episode) -> Score:
    """Raises: TypeError or ValueError for what can't be trained on."""
    if not isinstance(result, Score):
        return Score(checked_number(result))
    value = checked_number(result.value)
    parts = {str(name): checked_number(part) for name, part in result.parts.items()}
    spans = [(int(end), checked_number(share)) for end, share in result.spans]
    ends, last = [end for end, _ in spans], episode.turns[-1].end
    if ends != sorted(set(ends)) or not all(0 < end <= last for end in ends):
        raise ValueError(f"returned spans that end at {ends}; they must ascend, up to the {last} tokens of the episode")
    total = math.fsum(share for _, share in spans)
    if spans and not math.isclose(total, value, rel_tol=1e-6, abs_tol=1e-9):
        raise ValueError(f"returned spans of {total:g} in all for the value {value:g}")
    return Score(value, parts, tuple(spans))


def checked_number(value: object) -> float:
    """The value as a float. Raises: TypeError, ValueError or OverflowError for what can't be trained on."""
    if not isinstance(value, Real) or not math.isfinite(value):
        raise TypeError(f"returned {value!r}, which is no finite number")
    if abs(float(value)) > LARGEST_SCORE:
        raise ValueError(f"returned {value!r}, which is beyond {LARGEST_SCORE:g} in size")
    return float(value)


def _is_cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        return False
    return task is not None and task.cancelling() > 0
