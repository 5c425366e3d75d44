"""Calls reward functions on the episodes of a group, checks their results, and sums them by weight."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from slipstream.configs.runtime.errors import format_error
from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import Episode, Failure, FailureReason, Result, RewardUnavailable, Score
from slipstream.sandbox import SandboxUnavailable

LARGEST_SCORE = 1e8
"""The buffer refuses groups with larger ones, as `MOST_REWARD` of its messages."""
OUT_OF_TIME = (
    "not scored when the ticket's time was over; raise scoring.workers or, of an async reward, `concurrency`, or lower "
    "rollout.groups_in_flight"
)
_LONGEST_DETAIL = 500  # characters: a user's message ends up in counters and logs

_LONGEST_FEEDBACK = 10_000  # characters: it becomes part of a prompt

Takes = Literal["answer", "episode", "group"]


@dataclass(frozen=True)
class Call:
    """One call of a reward: with one episode of a group, or with all of them.

    Attributes:
        name: of the reward.
        indices: of the episodes.
    """

    name: str
    indices: tuple[int, ...]

    def failed(self, reason: FailureReason, detail: str) -> list[Result]:
        """The results when the call did not return."""
        return [Failure(reason, detail)] * len(self.indices)


@dataclass(frozen=True)
class Reward:
    """A reward function, and how it is called.

    Attributes:
        takes: `answer` (answer, reference, info), `episode` (one Episode) or `group` (all Episodes).
        is_async: whether its result must be awaited.
        deadline_s: `scoring.deadline_s`.
        retries: further tries of a failed call.
        open_calls: of an async reward, limits the calls that are open at a time; None: no limit.
    """

    name: str
    function: Callable[..., Any]
    takes: Takes
    is_async: bool
    deadline_s: float = math.inf
    retries: int = 0
    open_calls: asyncio.Semaphore | None = None

    @property
    def worst_case_s(self) -> float | None:
        """Seconds after which a call ends by the reward's own limits, without the wait for its turn; None without."""
        return getattr(self.function, "worst_case_s", None)

    @property
    def uses_threads(self) -> bool:
        """True if a call that has hit its limit may go on in a thread."""
        return getattr(self.function, "uses_threads", False) is True

    def limit_s(self, episodes: int) -> float:
        """Time of one call with so many episodes.

        An async reward with limits of its own has no other: in its time it may wait for a sandbox or an endpoint.
        """
        if self.is_async and self.worst_case_s is not None:
            return math.inf
        deadline_s = self.deadline_s * (episodes if self.takes == "group" else 1)
        return max(deadline_s, self.worst_case_s or 0.0)

    def calls(self, episodes: int) -> list[Call]:
        """The calls for a group of so many episodes."""
        if self.takes == "group":
            return [Call(self.name, tuple(range(episodes)))]
        return [Call(self.name, (index,)) for index in range(episodes)]

    def run(self, episodes: Sequence[Episode]) -> list[Result]:
        """The results of one call of a plain function, one for each episode."""
        try:
            return self._checked(self._call(episodes), episodes)
        except BaseException as error:  # noqa: BLE001  (user code may raise anything: a SystemExit, a panic of Rust)
            return self._failed(error, episodes)

    @asynccontextmanager
    async def slot(self, episodes: int, *, until: float | None = None) -> AsyncIterator[None]:
        """Waits until a call with so many episodes may be open.

        Raises: TimeoutError when it could hardly end by `until`, the event loop's time.
        """
        if self.open_calls is None:
            yield
            return
        timeout_s = None
        if until is not None:
            # Without a reserve for the call itself, each would begin when its time is nearly over, and fail.
            left_s = until - asyncio.get_running_loop().time()
            timeout_s = left_s - min(self.limit_s(episodes), left_s / 2)
        async with asyncio.timeout(timeout_s):
            await self.open_calls.acquire()
        try:
            yield
        finally:
            self.open_calls.release()

    async def run_async(self, episodes: Sequence[Episode]) -> list[Result]:
        """The results of one call of an async function, one for each episode; call it in a `slot`."""
        limit_s = self.limit_s(len(episodes))
        try:
            async with asyncio.timeout(None if math.isinf(limit_s) else limit_s) as limit:
                return self._checked(await self._call(episodes), episodes)
        except BaseException as error:
            # A KeyboardInterrupt is the reward's own; a CancelledError is, unless this task is being cancelled.
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            if isinstance(error, TimeoutError) and limit.expired():
                return [self.late(limit_s)] * len(episodes)
            return self._failed(error, episodes)

    def late(self, limit_s: float) -> Failure:
        """The result of a call that did not return within its limit."""
        return Failure("reward_timeout", f"{self.name}: no score within {limit_s:g} s; see scoring.deadline_s")

    def _call(self, episodes: Sequence[Episode]) -> Any:
        if self.takes == "group":
            return self.function(list(episodes))
        (episode,) = episodes
        if self.takes == "episode":
            return self.function(episode)
        return self.function(episode.answer, episode.reference, episode.info)

    def _checked(self, result: object, episodes: Sequence[Episode]) -> list[Result]:
        """Raises: TypeError or ValueError for what can't be trained on."""
        if self.takes != "group":
            return [_checked(result, episodes[0])]
        if not isinstance(result, Sequence) or len(result) != len(episodes):
            raise TypeError(f"returned {repr(result)[:100]}, which is no sequence of {len(episodes)} scores")
        return [self._checked_one(each, episode) for each, episode in zip(result, episodes, strict=True)]

    def _checked_one(self, result: object, episode: Episode) -> Result:
        """One of a group's: an error in place of a score costs that episode alone."""
        if isinstance(result, Failure):
            return result
        try:
            if isinstance(result, Exception):
                raise result
            return _checked(result, episode)
        except Exception as error:  # noqa: BLE001  (whichever the reward has chosen)
            return self._failure(error)

    def _failed(self, error: BaseException, episodes: Sequence[Episode]) -> list[Result]:
        return [self._failure(error)] * len(episodes)

    def _failure(self, error: BaseException) -> Failure:
        lacks = isinstance(error, RewardUnavailable | SandboxUnavailable)
        detail = f"{self.name}: {format_error(error)}"[:_LONGEST_DETAIL]
        # Errors of user code may contain lone surrogates.
        return Failure("reward_unavailable" if lacks else "reward_error", detail.encode(errors="replace").decode())


@dataclass(frozen=True)
class EpisodeReward:
    """The reward of one episode.

    Attributes:
        reward: the weighted sum.
        scores: each term before weighting, its parts as `<term>/<part>`.
        spans: (end, value) of the terms that have spans, weighted; the rest of `reward` is at the end.
        feedback: of all terms, one after the other.
    """

    reward: float
    scores: dict[str, float]
    spans: list[tuple[int, float]]
    feedback: str = ""


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
        feedback="\n".join(score.feedback for score in scores.values() if score.feedback),
    )


async def run_all(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results of coroutines that run at once. Raises: the first error; the others are cancelled then."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call) for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in running]


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
    return Score(value, parts, tuple(spans), str(result.feedback)[:_LONGEST_FEEDBACK])


def checked_number(value: object) -> float:
    """The value as a float. Raises: TypeError, ValueError or OverflowError for what can't be trained on."""
    if not isinstance(value, Real) or not math.isfinite(value):
        raise TypeError(f"returned {value!r}, which is no finite number")
    if abs(float(value)) > LARGEST_SCORE:
        raise ValueError(f"returned {value!r}, which is beyond {LARGEST_SCORE:g} in size")
    return float(value)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
