"""Parts that adapters share: numbered instances of a generated game, and sessions of synchronous games."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from threading import Lock
from typing import Any, Final, Protocol, TypeVar

from slipstream.configs.runtime.errors import ConfigError
from slipstream.env.base import MOST_TASKS, Action, Message, Split, Task, Turn
from slipstream.env.builtin.digits import permuted

Prompt = str | list[Message]
Result = TypeVar("Result")

_SEED_DIGITS: Final = 9
"""Seeds of games are below 10**9: packages take 32 bits."""


PACKAGES: Final = {
    "gymnasium": "gymnasium",
    "openenv": "websockets",
    "reasoning_gym": "reasoning_gym",
    "skyrl_gym": "skyrl_gym",
    "textarena": "textarena",
}
"""The module that an env needs, by the env's name; its extra has the same name."""


def require(env: str, module: str = "") -> Any:
    """The module that an env needs, or a part of it. Raises: ConfigError that names the extra to install."""
    package = PACKAGES[env]
    try:
        return import_module(module or package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(missing_package(env)) from None


def missing_package(env: str) -> str:
    """The problem of an env whose package is not installed, with the remedy."""
    return f'env {env} needs the package {PACKAGES[env]}: pip install "slipstream[{env.replace("_", "-")}]"'


def fingerprint(package: str, options: Any) -> str:
    """Hash of the package's version and the options, plain JSON values, that determine the tasks."""
    return hash_of([*release(package), options])


def release(package: str) -> list[str]:
    """Name and version of an installed distribution."""
    return [package, version(package)]


def hash_of(value: Any) -> str:
    """Hash of a plain JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Instances:
    """Numbered instances of a generated game: each has a seed, and no two of a run share one.

    Raises: ConfigError for sizes out of range.
    """

    size: int
    eval_size: int
    seed: int

    def __post_init__(self) -> None:
        for name, value, least in (("size", self.size, 1), ("eval_size", self.eval_size, 0), ("seed", self.seed, 0)):
            if not isinstance(value, int) or not least <= value <= MOST_TASKS:
                raise ConfigError(f"env.options.{name}={value!r} must be a whole number from {least} to {MOST_TASKS}")

    def count(self, split: Split) -> int:
        """Number of instances in the split."""
        return self.eval_size if split == "eval" else self.size

    def position(self, split: Split, index: int) -> int:
        """Number of an instance over both splits. Raises: IndexError unless 0 <= index < count(split)."""
        if not 0 <= index < self.count(split):
            raise IndexError(f"{split} task {index} does not exist; there are {self.count(split)}")
        return index if split == "eval" else self.eval_size + index

    def seed_of(self, split: Split, index: int) -> int:
        """Seed of an instance. Raises: as `position`."""
        return permuted(self.position(split, index), digits=_SEED_DIGITS, seed=self.seed)


class GeneratedGames:
    """An env of games by seed: the prompt of a task comes from its session.

    Args:
        size, eval_size, seed: of its `Instances`.
        made_by: package and version, or what else makes a game of a seed; part of the fingerprint.
        options: the env's other options, plain JSON values.

    Raises: ConfigError for sizes out of range.
    """

    def __init__(self, size: int, eval_size: int, seed: int, *, made_by: Any, options: Sequence[Any]) -> None:
        self._instances = Instances(size, eval_size, seed)
        self._fingerprint = hash_of([made_by, *options, size, eval_size, seed])

    def size(self, split: Split) -> int:
        """Number of games in the split."""
        return self._instances.count(split)

    def task(self, split: Split, index: int) -> Task:
        """The game at `index`, with its seed as `info`. Raises: IndexError unless 0 <= index < size(split)."""
        return Task(prompt="", reference="", info={"seed": self._instances.seed_of(split, index)})

    def fingerprint(self) -> str:
        """Hash of what determines the tasks."""
        return self._fingerprint


def as_prompt(text: str, *, chat: bool) -> Prompt:
    """The text itself, or as a chat message of the user."""
    return [{"role": "user", "content": text}] if chat else text


class Game(Protocol):
    """One episode of a synchronous package; its methods may block, and are called one at a time."""

    def reset(self) -> Prompt:
        """The prompt of the first action."""
        ...

    def step(self, text: str) -> Turn:
        """Applies an action."""
        ...

    def close(self) -> None:
        """Frees what the game holds; also called after a failed `reset`."""
        ...


class ThreadedSession:
    """A session that plays a `Game` in the threads of its event loop's executor, whose number is bounded."""

    def __init__(self, game: Game, *, resumable: bool = False) -> None:
        """`resumable`: see `Session`."""
        self.resumable = resumable
        self._game = game
        # After a cancelled call its thread goes on: `close` must wait for it.
        self._lock = Lock()

    async def reset(self) -> Prompt:
        """The first observation of the game."""
        return await self._run(self._game.reset)

    async def step(self, action: Action) -> Turn:
        """Plays one action; the observation, reward and end of the game that follow."""
        return await self._run(lambda: self._game.step(action.text))

    async def close(self) -> None:
        """Closes the game."""
        await self._run(self._game.close)

    async def _run(self, function: Callable[[], Result]) -> Result:
        def locked() -> Result:
            with self._lock:
                return function()

        return await asyncio.to_thread(locked)
