"""Finds rewards by name, builds those with options, and determines how each is called by its signature."""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pydantic import ValidationError

from slipstream.configs.registry import Registry
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError, format_error
from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import Episode, takes_group
from slipstream.rewards.compose import Reward, Takes

REWARDS: Final = Registry(
    "reward",
    {
        "by_source": "slipstream.rewards.functions.by_source:BySource",
        "exact_match": "slipstream.rewards.functions.text:exact_match",
        "digit_match": "slipstream.rewards.functions.text:digit_match",
        "none": "slipstream.rewards.functions.text:none",
        "reward_model": "slipstream.rewards.functions.reward_model:RewardModel",
        "repetition": "slipstream.rewards.functions.text:Repetition",
        "reasoning_gym": "slipstream.rewards.functions.reasoning_gym:reasoning_gym",
        "code": "slipstream.rewards.functions.code:Code",
        "format": "slipstream.rewards.functions.text:Format",
        "judge": "slipstream.rewards.functions.judge:Judge",
        "length": "slipstream.rewards.functions.text:Length",
        "math": "slipstream.rewards.functions.math:Math",
    },
)

CONCURRENCY: Final = 32
"""Open calls of an async reward, unless its term or its own limits say otherwise: clients and servers allow about 100
connections, of all rollout servers together."""
_WANTED: Final = (
    "a function (answer, reference, info), (episode: Episode) or, with @group_reward, (episodes), plain or async, "
    "that returns numbers or Scores, or a class whose instances are called so"
)
_ARGUMENTS: dict[Takes, tuple[object, ...]] = {"answer": ("", "", {}), "episode": (None,), "group": ([],)}


def find_reward(term: RewardConfig, *, deadline_s: float = math.inf) -> Reward:
    """The reward of a term. A class with `__call__` is instantiated with the term's options.

    Args:
        deadline_s: time of a call. A reward that calls others is given it by its method `set_deadline`.

    Raises: ConfigError if there is none, if its options are wrong, or if it is not of one of the kinds in
        `rewards.base`.
    """
    name = term.function or term.name
    function = REWARDS.load(name)
    if inspect.isclass(function) and any("__call__" in vars(base) for base in function.__mro__):
        function = _build(term.name, function, term.options)
    elif term.options:
        raise ConfigError(f"reward {term.name!r} has options ({', '.join(term.options)}), but {name!r} takes none")
    if inspect.isclass(function) or not callable(function):
        kind = "class" if inspect.isclass(function) else type(function).__name__
        raise ConfigError(f"reward {term.name!r} is a {kind}, not {_WANTED}")
    is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
    if hasattr(function, "set_deadline"):
        function.set_deadline(deadline_s)
    reward = Reward(term.name, function, _takes(term.name, function), is_async, deadline_s, term.retries)
    return replace(reward, open_calls=_open_calls(term, reward))


def find_rewards(terms: Sequence[RewardConfig], *, deadline_s: float = math.inf) -> dict[str, Reward]:
    """The reward of every term by its name.

    Raises: ConfigError with one problem for each term that can't be used.
    """
    found: dict[str, Reward] = {}
    problems: list[str] = []
    for term in terms:
        try:
            found[term.name] = find_reward(term, deadline_s=deadline_s)
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return found


def _build(name: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Raises: ConfigError."""
    try:
        return factory(**options)
    except ValidationError as error:
        problems = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors(include_url=False)]
        raise ConfigError([f"reward {name!r}, options {key}: {problem}" for key, problem in problems]) from None
    except SlipstreamError as error:
        raise ConfigError([f"reward {name!r}: {problem}" for problem in error.problems]) from error
    except Exception as error:  # a user's constructor may raise anything
        given = ", ".join(options) or "none"
        raise ConfigError(
            f"reward {name!r} can't be built with its options ({given}): {format_error(error)}"
        ) from error


def _open_calls(term: RewardConfig, reward: Reward) -> asyncio.Semaphore | None:
    """Raises: ConfigError for a limit that would have no effect."""
    if term.concurrency is None:
        return asyncio.Semaphore(CONCURRENCY) if reward.is_async and reward.worst_case_s is None else None
    if not reward.is_async:
        raise ConfigError(
            f"reward {term.name!r}: concurrency={term.concurrency} is for async functions; scoring.workers limits the "
            "calls of this one"
        )
    if hasattr(reward.function, "concurrency"):
        raise ConfigError(
            f"reward {term.name!r} limits its own requests: set options.concurrency={term.concurrency} instead"
        )
    return asyncio.Semaphore(term.concurrency)


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
