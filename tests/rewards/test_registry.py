"""Rewards of the user's own: what can be called with an answer is found, what can't is refused at the start."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.rewards.registry import find_reward


def only_answer(answer: str) -> float:
    return 1.0


def with_a_prompt(prompt: str, answer: str, reference: str, info: Mapping[str, Any]) -> float:
    return 1.0


def by_keyword(answer: str, reference: str, *, info: Mapping[str, Any]) -> float:
    return 1.0


def with_a_default(answer: str, reference: str, info: Mapping[str, Any], scale: float = 2.0) -> float:
    return scale


def of_anything(*given: object) -> float:
    return len(given)


class Judge:
    async def __call__(self, answer: str, reference: str, info: Mapping[str, Any]) -> float:
        return 1.0


async def awaited(answer: str, reference: str, info: Mapping[str, Any]) -> float:
    return 1.0


judge = Judge()


@pytest.mark.parametrize("name", ["awaited", "judge"])
def test_a_reward_that_would_have_to_be_awaited_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is a coroutine function, not a function"):
        find_reward(f"{__name__}:{name}")


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        (only_answer, "takes (answer: str) -> float: too many positional arguments"),
        (with_a_prompt, "missing a required argument: 'info'"),
        (by_keyword, "too many positional arguments"),
    ],
)
def test_a_reward_that_can_not_be_called_with_an_answer_is_refused_before_there_is_one(
    reward: Callable[..., float], problem: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        find_reward(f"{__name__}:{reward.__name__}")
    assert str(caught.value).endswith("; it must be a function (answer, reference, info) -> float")


@pytest.mark.parametrize("reward", [with_a_default, of_anything])
def test_a_reward_may_take_more_than_it_is_given(reward: Callable[..., float]) -> None:
    assert find_reward(f"{__name__}:{reward.__name__}") is reward


def test_a_function_of_c_without_a_signature_is_left_to_its_first_call() -> None:
    found: object = find_reward("builtins:max")
    assert found is max
