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
    of_first_rank = set(LEARNERS_SECRETS) - {REDIS_PASSWORD_VARIABLE}
    if config.learner.checkpoint.upload is not None:
        of_first_rank |= {name for name in os.environ if name.startswith(STORES_VARIABLES)}
    needs: dict[str, set[str]] = {name: {"learner"} for name in of_first_rank}
    needs[REDIS_PASSWORD_VARIABLE] = {"buffer", "learner"}
    for name in _key_variables(config.model_dump()):
        needs.setdefault(name, set()).add("rollout")
    withheld = {name for name, processes in needs.items() if process not in processes}
    return withheld | (of_first_rank if rank else set())


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
