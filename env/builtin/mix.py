"""A weighted mixture of envs."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar, Final

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.env.base import Action, Env, Message, Session, Split, Task, Turn, has_sessions, offers_tools

log = get_log("env.mix")

LABEL: Final = "env"
"""Key of a task's `info`: the label of the env that the task is from."""
_MOST_TRAIN_TASKS: Final = 10**7  # the buffer shuffles that many in less than a second


@dataclass(frozen=True)
class Part:
    """An env of a mixture; `weight` is its share of the train tasks, relative to the others."""

    label: str
    env: Env
    weight: float


class Mix:
    """The tasks of several envs.

    An epoch has as many train tasks as all of them need to be drawn at least once with these weights; tasks of the
    smaller envs recur in it. Held-out tasks come in turn, one of each env, so that the first of them are of all envs.

    Raises: ConfigError without a weight above 0, or for an env with a weight and without train tasks.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        total = sum(part.weight for part in parts)
        sizes = [part.env.size("train") for part in parts]
        if not total:
            raise ConfigError("env mix: no env has a weight above 0, so there is nothing to train on")
        empty = [part.label for part, size in zip(parts, sizes, strict=True) if part.weight and not size]
        if empty:
            raise ConfigError(f"env mix: {', '.join(empty)}: no train tasks; set weight: 0 to evaluate alone")
        self.labels = tuple(part.label for part in parts)
        self._parts = parts
        self._sizes = sizes
        epoch = max(size * total / part.weight for part, size in zip(parts, sizes, strict=True) if part.weight)
        if epoch > _MOST_TRAIN_TASKS:
            log.warning("an epoch of the mixture leaves tasks out", needed=round(epoch), tasks=_MOST_TRAIN_TASKS)
        drawn = [round(min(epoch, _MOST_TRAIN_TASKS) * part.weight / total) for part in parts]
        self._ends = list(
            accumulate(max(1, tasks) if part.weight else 0 for tasks, part in zip(drawn, parts, strict=True))
        )
        self._held_out = [part.env.size("eval") for part in parts]

    def size(self, split: Split) -> int:
        """Number of tasks in the split."""
        return self._ends[-1] if split == "train" else sum(self._held_out)

    def task(self, split: Split, index: int) -> Task:
        """The task at `index`, with its env's label in `info`.

        Raises: IndexError unless 0 <= index < size(split).
        """
        if not 0 <= index < self.size(split):
            raise IndexError(f"env mix: {split} task {index} does not exist; there are {self.size(split)}")
        if split == "train":
            number = bisect_right(self._ends, index)
            within = (index - (self._ends[number - 1] if number else 0)) % self._sizes[number]
        else:
            number, within = _in_turn(self._held_out, index)
        part = self._parts[number]
        task = part.env.task(split, within)
        return replace(task, info={**task.info, LABEL: part.label})

    def fingerprint(self) -> str:
        """Hash of the weights, labels and fingerprints of the envs."""
        described = [[part.label, part.weight, part.env.fingerprint()] for part in self._parts]
        return hashlib.sha256(json.dumps(["mix", 1, described]).encode()).hexdigest()


class MixWithSessions(Mix):
    """A mixture of which at least one env has sessions; tasks of the others have one turn."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(parts)
        self._envs = {part.label: part.env for part in parts}
        self.offers_tools = any(offers_tools(part.env) for part in parts)

    def session(self, task: Task) -> Session:
        """A session of the task's env."""
        env = self._envs[task.info[LABEL]]
        return env.session(task) if has_sessions(env) else _OneTurn(task)


@dataclass(frozen=True)
class _OneTurn:
    """The session of a task whose env has none."""

    of: Task
    resumable: ClassVar[bool] = True

    async def reset(self) -> str | Sequence[Message]:
        """The task's prompt."""
        return self.of.prompt

    async def step(self, action: Action) -> Turn:
        """Ends the episode."""
        return Turn(done=True)

    async def close(self) -> None:
        """Does nothing."""


def _in_turn(sizes: Sequence[int], index: int) -> tuple[int, int]:
    """The env, and the index within it, of the task at `index` when each env with tasks left gives one in turn."""
    rounds = 0
    for size in sorted(set(sizes)):
        left = [number for number, each in enumerate(sizes) if each > rounds]
        tasks = (size - rounds) * len(left)
        if index < tasks:
            return left[index % len(left)], rounds + index // len(left)
        index, rounds = index - tasks, size
    raise AssertionError("index is below the sum of the sizes")
