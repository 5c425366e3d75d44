"""Environment variables that hold secrets, and the processes of a run that need them."""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from slipstream.configs import RunConfig
from slipstream.configs.runtime.passwords import LEARNERS_SECRETS, REDIS_PASSWORD_VARIABLE

STORES_VARIABLES: Final = ("AWS_", "AZURE_STORAGE_", "GOOGLE_APPLICATION_CREDENTIALS", "FSSPEC_")
"""First parts of the names of variables with which object stores are reached; withheld if there are uploads."""
KEY_OPTION: Final = "api_key_variable"
"""Option of rewards that names the variable of their endpoint's key."""


def withheld_from(process: str, config: RunConfig, *, rank: int = 0) -> set[str]:
    """Names of the variables with secrets that other processes of the run need, but not this one.

    Args:
        rank: of a learner; only the first one has trackers and uploads.
    """
    withheld = {name for name, processes in _needs(config).items() if process not in processes}
    return withheld | (_of_first_rank(config) if rank else set())


def needed_by(process: str, config: RunConfig) -> tuple[str, ...]:
    """Names of the variables with secrets that a process of the run, or a Redis server for it, may need."""
    needs = _needs(config)
    needs[REDIS_PASSWORD_VARIABLE].add("redis")
    return tuple(sorted(name for name, processes in needs.items() if process in processes))


def _needs(config: RunConfig) -> dict[str, set[str]]:
    """Kinds of processes by the variable that they need."""
    needs: dict[str, set[str]] = {name: {"learner"} for name in _of_first_rank(config)}
    needs[REDIS_PASSWORD_VARIABLE] = {"buffer", "learner"}
    for name in _key_variables(config.model_dump()):
        needs.setdefault(name, set()).add("rollout")
    return needs


def _of_first_rank(config: RunConfig) -> set[str]:
    """Variables that only rank 0 needs."""
    names = set(LEARNERS_SECRETS) - {REDIS_PASSWORD_VARIABLE}
    if config.learner.checkpoint.upload is not None:
        names |= {name for name in os.environ if name.startswith(STORES_VARIABLES)}
    return names


@contextmanager
def withheld(names: Collection[str]) -> Iterator[None]:
    """Context in which this process's environment lacks these variables."""
    saved = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(saved)


def _key_variables(tree: Any) -> Iterator[str]:
    """The values of `KEY_OPTION` at any depth: rewards may consist of others."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if key == KEY_OPTION and isinstance(value, str):
                yield value
            else:
                yield from _key_variables(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _key_variables(value)
