"""The reward `by_source`: each task is scored by the reward of its data source, or of its env."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import field
from fnmatch import fnmatchcase
from typing import Any, Final

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from slipstream.configs.runtime.threads import run_in_thread
from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import Episode, Score, group_reward
from slipstream.rewards.compose import Reward
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
    """By source, or pattern of sources (`aime*`): a reward's name, or its `name`, `function` and `options`. They come
    before those that are known: of the sources in verl's data sets."""
    default: str | Mapping[str, Any] | None = None
    """Reward of all other sources; unset: their groups fail."""
    key: str = "data_source"
    """Key of the task's info with its source; `env`: the label of an env in a mixture."""

    def __post_init__(self) -> None:
        self._found = {pattern: find_reward(_term(each)) for pattern, each in self.rewards.items()}
        self._default = None if self.default is None else find_reward(_term(self.default))
        # Plain rewards need not be safe for threads. The locks are of the event loop: a call that hangs past the
        # deadline of its group keeps its thread, but not its lock.
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def __call__(self, episodes: Sequence[Episode]) -> Sequence[Score]:
        """See the class; the episodes are of one task. Raises: RewardFailed too."""
        label, reward = self.reward_of(episodes[0].info)
        if reward.is_async:
            scores = await reward.score_async(episodes)
        else:  # outside of the event loop, as elsewhere: it may call asyncio.run itself
            async with self._locks[id(reward.function)]:
                scores = await run_in_thread(reward.score, episodes)
        return [Score(each.value, {**each.parts, label: each.value}, each.spans) for each in scores]

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


def _term(reward: str | Mapping[str, Any]) -> RewardConfig:
    return RewardConfig.model_validate({"name": reward} if isinstance(reward, str) else reward)
