"""The reward `by_source`: each task is scored by the reward of its data source, or of its env."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, ClassVar, Final

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.threads import run_in_thread
from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import Episode, Failure, Result, Score, group_reward
from slipstream.rewards.compose import Reward, run_all
from slipstream.rewards.registry import find_reward
from slipstream.rewards.runners.base import close_rewards

KNOWN_SOURCES: Final = {
    "openai/gsm8k": "math",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math*": "math",
    "aime*": "math",
    "numina_*": "math",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
}
"""Rewards of the sources in verl's data sets."""


@group_reward
@dataclass(kw_only=True, config=ConfigDict(extra="forbid"))
class BySource:
    """The score of the reward that the task's source has; it is recorded as the part `<source>` too.

    Raises: ConfigError for a reward that can't be used. When called: ValueError for a source without a reward.
    """

    rewards: Mapping[str, str | Mapping[str, Any]] = field(default_factory=dict)
    """By source, or pattern of sources (`aime*`): a reward's name, or its `name`, `function`, `options` and
    `concurrency`. They come before those that are known: of the sources in verl's data sets."""
    default: str | Mapping[str, Any] | None = None
    """Reward of all other sources; unset: their groups fail."""
    key: str = "data_source"
    """Key of the task's info with its source; `env`: the label of an env in a mixture."""

    uses_threads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._deadline_s = math.inf
        self._found = {pattern: find_reward(_term(each)) for pattern, each in self.rewards.items()}
        self._default = None if self.default is None else find_reward(_term(self.default))
        # Plain rewards need not be safe for threads. The locks are of the event loop: a call that hangs past its limit
        # keeps its thread, but not its lock.
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    def set_deadline(self, deadline_s: float) -> None:
        """Sets the time of one call of each reward that has no limit of its own."""
        self._deadline_s = deadline_s

    @property
    def worst_case_s(self) -> float:
        """That of the slowest reward which was given."""
        given = [*self._found.values(), *([] if self._default is None else [self._default])]
        return max([self._deadline_s, *(reward.worst_case_s or 0.0 for reward in given)])

    async def __call__(self, episodes: Sequence[Episode]) -> Sequence[Result]:
        """The results of the reward for the source of the episodes' task."""
        label, reward = self.reward_of(episodes[0].info)
        reward = replace(reward, deadline_s=self._deadline_s)
        calls = [[episodes[index] for index in call.indices] for call in reward.calls(len(episodes))]
        run = partial(_run_async if reward.is_async else self._run_in_thread, reward)
        results = [result for results in await run_all([run(chosen) for chosen in calls]) for result in results]
        return [
            each if isinstance(each, Failure) else Score(each.value, {**each.parts, label: each.value}, each.spans)
            for each in results
        ]

    async def _run_in_thread(self, reward: Reward, episodes: Sequence[Episode]) -> list[Result]:
        """Outside of the event loop, as elsewhere: the reward may call asyncio.run itself."""
        limit_s = reward.limit_s(len(episodes))
        async with self._locks[id(reward.function)]:
            try:
                async with asyncio.timeout(None if math.isinf(limit_s) else limit_s):
                    results: list[Result] = await run_in_thread(reward.run, episodes)
            except TimeoutError:
                return [reward.late(limit_s)] * len(episodes)
        return results

    def close(self) -> None:
        """Ends what the rewards have started."""
        close_rewards([*self._found.values(), *([] if self._default is None else [self._default])])

    def reward_of(self, info: Mapping[str, Any]) -> tuple[str, Reward]:
        """The pattern that a task's source matches, and its reward. Raises: ValueError."""
        source = info.get(self.key)
        for pattern in (*self._found, *KNOWN_SOURCES):
            if isinstance(source, str) and fnmatchcase(source, pattern):
                # A known one is built here: most runs need one of them, and each may need a package of its own.
                if pattern not in self._found:
                    self._found[pattern] = find_reward(_term(KNOWN_SOURCES[pattern]))
                return pattern, self._found[pattern]
        if self._default is None:
            raise ValueError(
                f"there is no reward for {self.key}={source!r}: add it to options.rewards, or options.default"
            )
        return "default", self._default


async def _run_async(reward: Reward, episodes: Sequence[Episode]) -> list[Result]:
    async with reward.slot(len(episodes)):
        return await reward.run_async(episodes)


def _term(reward: str | Mapping[str, Any]) -> RewardConfig:
    """Raises: ConfigError for keys without an effect here."""
    term = RewardConfig.model_validate({"name": reward} if isinstance(reward, str) else reward)
    if unused := term.model_fields_set & {"retries", "weight"}:
        raise ConfigError(f"options: {', '.join(sorted(unused))} of {term.name} has no effect; set it for by_source")
    return term
