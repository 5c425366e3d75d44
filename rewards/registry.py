"""Finds rewards by name."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.configs.plugins import find_plugin
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rewards.base import Reward
from slipstream.rewards.functions.match import digit_match, exact_match

_WANTED = "a function (answer, reference, info) -> float"

BUILT_IN: dict[str, Reward] = {"exact_match": exact_match, "digit_match": digit_match}


def find_reward(name: str) -> Reward:
    """What `name` stands for: built in, an entry point of `slipstream.rewards`, or `module:attribute`.

    Raises: ConfigError if there is none, or if it is no function that takes what a reward is given.
    """
    reward = find_plugin("reward", name, BUILT_IN)
    if inspect.isclass(reward):
        kind = "class"
    elif any(map(inspect.iscoroutinefunction, (reward, getattr(reward, "__call__", None)))):  # noqa: B004
        kind = "coroutine function"
    elif not callable(reward):
        kind = type(reward).__name__
    else:
        _check_signature(name, reward)
        found: Reward = reward
        return found
    raise ConfigError(f"reward {name!r} is a {kind}, not {_WANTED}")


def _check_signature(name: str, reward: Callable[..., Any]) -> None:
    """Before any answer is scored: every one would cost its group."""
    try:
        signature = inspect.signature(reward)
    except ValueError:  # one of C may have none; then its first call must tell
        return
    try:
        signature.bind("", "", {})
    except TypeError as error:
        raise ConfigError(f"reward {name!r} takes {signature}: {error}; it must be {_WANTED}") from None


def find_rewards(names: Sequence[str]) -> dict[str, Reward]:
    """Every named reward.

    Raises: ConfigError with one problem for each name that can't be used.
    """
    found: dict[str, Reward] = {}
    problems: list[str] = []
    for name in names:
        try:
            found[name] = find_reward(name)
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return found
