"""Finding rewards by name, and how each is called by its signature."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.configs.schema.run import RewardConfig, RunConfig
from slipstream.rewards import base
from slipstream.rewards.base import Episode, Score, group_reward
from slipstream.rewards.functions.text import digit_match, exact_match
from slipstream.rewards.registry import find_reward, find_rewards

Info = Mapping[str, Any]


def only_answer(answer: str) -> float:
    return 1.0


def with_a_prompt(prompt: str, answer: str, reference: str, info: Info) -> float:
    return 1.0


def by_keyword(answer: str, reference: str, *, info: Info) -> float:
    return 1.0


def episode_and_more(episode: Episode, other: str) -> float:
    return 1.0


@group_reward
def group_and_more(episodes: Sequence[Episode], other: str) -> list[float]:
    return []


def with_a_default(answer: str, reference: str, info: Info, scale: float = 2.0) -> float:
    return scale


def of_anything(*given: object) -> float:
    return len(given)


def of_an_episode(episode: Episode) -> Score:
    return Score(1.0)


def of_a_named_episode(episode: "base.Episode") -> float:
    return 1.0


@group_reward
def of_a_group(episodes: Sequence[Episode]) -> list[float]:
    return [1.0] * len(episodes)


async def awaited(answer: str, reference: str, info: Info) -> float:
    return 1.0


@group_reward
async def awaited_group(episodes: Sequence[Episode]) -> list[float]:
    return [1.0] * len(episodes)


class Judge:
    async def __call__(self, episode: Episode) -> float:
        return 1.0


judge = Judge()


class Scaled:
    """A reward with options."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = float(scale)

    def __call__(self, answer: str, reference: str, info: Info) -> float:
        return self.scale


class Unavailable(Scaled):
    def __init__(self) -> None:
        raise SlipstreamError("no sandbox")


@dataclass(config=ConfigDict(extra="forbid"))
class Checked:
    """A reward whose options pydantic checks."""

    size: int = 1

    def __call__(self, episode: Episode) -> float:
        return self.size


def named(name: str, **options: object) -> RewardConfig:
    return RewardConfig(name=f"{__name__}:{name}", options=options)


@pytest.mark.parametrize(
    ("name", "takes", "is_async"),
    [
        ("with_a_default", "answer", False), ("of_anything", "answer", False), ("of_an_episode", "episode", False),
        ("of_a_named_episode", "episode", False), ("of_a_group", "group", False), ("awaited", "answer", True),
        ("awaited_group", "group", True), ("judge", "episode", True),
    ],
)  # fmt: skip
def test_the_signature_decides_how_a_reward_is_called(name: str, takes: str, is_async: bool) -> None:
    found = find_reward(named(name))
    assert (found.function, found.takes, found.is_async) == (globals()[name], takes, is_async)
    assert find_reward(RewardConfig(name="builtins:max")).takes == "answer", "a function of C has no signature"


@pytest.mark.parametrize("reward", [only_answer, with_a_prompt, by_keyword, episode_and_more, group_and_more])
def test_a_wrong_signature_is_refused_and_shown(reward: Callable[..., object]) -> None:
    with pytest.raises(ConfigError, match=re.escape("(answer, reference, info), (episode: Episode)")) as caught:
        find_reward(named(reward.__name__))
    assert reward.__name__ in str(caught.value)


def test_built_in_rewards_are_found_by_name() -> None:
    found = find_rewards([RewardConfig(name="digit_match"), RewardConfig(name="second", function="exact_match")])
    functions = {name: reward.function for name, reward in found.items()}
    assert functions == {"digit_match": digit_match, "second": exact_match}


def test_every_unusable_reward_is_reported_at_once() -> None:
    names = ["exact_mach", "math:pi", "exact_match", "fractions:Fraction"]
    with pytest.raises(ConfigError) as caught:
        find_rewards([RewardConfig(name=name) for name in names])
    first, second, third = caught.value.problems
    assert "'exact_mach' (did you mean 'exact_match'?)" in first
    assert "'math:pi' is a float" in second
    assert "'fractions:Fraction' is a class" in third


def test_a_class_is_built_with_its_options() -> None:
    assert find_reward(named("Scaled")).function("", "", {}) == 1.0
    scaled, checked = find_reward(named("Scaled", scale=3)), find_reward(named("Checked", size="2"))
    assert (scaled.function("", "", {}), scaled.takes) == (3.0, "answer")
    assert (checked.function(None), checked.takes) == (2, "episode")


@pytest.mark.parametrize(
    ("term", "match"),
    [
        (named("Scaled", scales=2), "scales"),
        (named("Scaled", scale="x"), "could not convert"),
        (named("Checked", sizes=2), "sizes"),
        (named("Unavailable"), "no sandbox"),
        (RewardConfig(name="exact_match", options={"scale": 2}), "scale"),
        (named("judge", scale=2), "scale"),
    ],
)
def test_wrong_options_are_refused(term: RewardConfig, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        find_rewards([term])
    assert repr(term.name) in str(caught.value)


@pytest.mark.parametrize(
    ("term", "match"),
    [
        (RewardConfig(name="exact_match", concurrency=4), r"concurrency=4 .*scoring\.workers"),
        (
            RewardConfig(name="judge", options={"url": "http://h/v1", "model": "m"}, concurrency=4),
            r"options\.concurrency",
        ),
    ],
)
def test_limit_without_effect_is_refused(term: RewardConfig, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        find_rewards([term])


def test_open_calls_of_rewards_with_own_limits_are_not_limited() -> None:
    judge = RewardConfig(name="judge", options={"url": "http://h/v1", "model": "m"})
    assert [find_reward(term).open_calls is None for term in (judge, named("awaited"), named("awaited_group"))] == [
        True,
        False,
        False,
    ]


def test_an_evaluated_term_keeps_its_options() -> None:
    terms = [{"name": "exact_match"}, {"name": "math", "weight": 0, "options": {"extract": "boxed"}}]
    config = RunConfig.model_validate({"model": {"build": "digits"}, "rewards": terms, "eval": {"reward": "math"}})
    (term,) = config.evaluated
    assert (term.weight, term.options) == (1.0, {"extract": "boxed"})
