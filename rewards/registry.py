"""Finds rewards by name, and how each is called by its signature."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.configs.plugins import find_plugin
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rewards.base import Episode, takes_group
from slipstream.rewards.compose import Reward, Takes
from slipstream.rewards.functions import digit_match, exact_match

BUILT_IN: dict[str, Callable[..., float]] = {"exact_match": exact_match, "digit_match": digit_match}

_WANTED = (
    "a function (answer, reference, info), (episode: Episode) or, with @group_reward, (episodes), plain or async, "
    "that returns numbers or Scores"
)
_ARGUMENTS: dict[Takes, tuple[object, ...]] = {"answer": ("", "", {}), "episode": (None,), "group": ([],)}


def find_reward(name: str) -> Reward:
    """The reward `name`: built in, an entry point of `slipstream.rewards`, or `module:attribute`.

    Raises: ConfigError if there is none, or if it is no function of one of the kinds in `rewards.base`.
    """
    function = find_plugin("reward", name, BUILT_IN)
    if inspect.isclass(function) or not callable(function):
        kind = "class" if inspect.isclass(function) else type(function).__name__
        raise ConfigError(f"reward {name!r} is a {kind}, not {_WANTED}")
    is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
    return Reward(name, function, _takes(name, function), is_async)


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


def _takes(name: str, function: Callable[..., Any]) -> Takes:
    """Checked before the first answer: with a wrong signature every group would fail."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # functions of C may have none; the first call decides
        return "answer"
    takes: Takes = "group" if takes_group(function) else "episode" if _wants_episode(signature) else "answer"
    try:
        signature.bind(*_ARGUMENTS[takes])
    except TypeError as error:
        raise ConfigError(f"reward {name!r} takes {signature}: {error}; it must be {_WANTED}") from None
    return takes


def _wants_episode(signature: inspect.Signature) -> bool:
    first = next(iter(signature.parameters.values()), None)
    # Annotations are texts under `from __future__ import annotations`; what they name may not be importable here.
    return first is not None and (
        first.annotation is Episode or str(first.annotation).rpartition(".")[2] == Episode.__name__
    )
