"""Tasks of two turns whose answer only a tool gives: look a key up, then answer with its value."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from slipstream.configs.runtime.errors import ConfigError
from slipstream.env.base import MOST_TASKS, Action, Split, Task, ToolCall, Turn
from slipstream.env.tools.schema import Tool, whole_schema
from slipstream.env.tools.session import CALLS, ERRORS, LimitedTool, run_calls

CALL, END = "c", "="
"""Before a key in a call; after a task and after a result."""
ERROR = "E"
"""The observation for a key that is in no table."""
KEYS = 10

_SCHEMA = whole_schema(
    "lookup",
    "Looks a key up in the table of this episode.",
    {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
)
_DEADLINE_S = 10.0
_MOST_CHARACTERS = 16


class Lookup:
    """Each task has a key and a table of its own, from 0-9 to values of `digits` digits: "7=" asks for the value of 7.

    The policy calls the tool `lookup` by the text "c7", sees "<value>=", and answers with the value. Without the call
    an answer is right by chance. Text alone is exchanged, so models without a chat template can be trained. A call
    earns `call_reward`: a quarter for its first character, its length, a digit as key and the right key each.

    Raises: ConfigError for options out of range.
    """

    def __init__(
        self,
        digits: int = 1,
        train_tasks: int = 100_000,
        eval_tasks: int = 256,
        call_reward: float = 1.0,
        seed: int = 0,
    ) -> None:
        if not isinstance(digits, int) or not 1 <= digits <= _MOST_CHARACTERS:
            raise ConfigError(f"env lookup: digits={digits!r} must be a whole number from 1 to {_MOST_CHARACTERS}")
        sizes: dict[Split, int] = {"train": train_tasks, "eval": eval_tasks}
        for split, size in sizes.items():
            if not isinstance(size, int) or not 0 <= size <= MOST_TASKS:
                raise ConfigError(f"env lookup: {split}_tasks={size!r} must be a whole number from 0 to {MOST_TASKS}")
        self._digits = digits
        self._sizes = sizes
        self._call_reward = call_reward
        self._seed = seed

    def size(self, split: Split) -> int:
        """Number of tasks in the split."""
        return self._sizes[split]

    def task(self, split: Split, index: int) -> Task:
        """The task at `index`. Raises: IndexError unless 0 <= index < size(split)."""
        if not 0 <= index < self.size(split):
            raise IndexError(f"env lookup: {split} task {index} does not exist; there are {self.size(split)}")
        table = f"{self._seed}/{split}/{index}"
        key = str(_hashed(table) % KEYS)
        return Task(prompt=f"{key}{END}", reference=self.value(table, key), info={"table": table, "key": key})

    def fingerprint(self) -> str:
        """Hash of the options, which determine every task."""
        options = [self._digits, self._sizes["train"], self._sizes["eval"], self._call_reward, self._seed]
        return hashlib.sha256(json.dumps(["lookup", 1, *options]).encode()).hexdigest()

    def session(self, task: Task) -> "LookupSession":
        """An episode of the task."""
        return LookupSession(self, task)

    def value(self, table: str, key: str) -> str:
        """The value of a key. Raises: KeyError for a key that is not in the table."""
        if len(key) != 1 or key not in "0123456789":
            raise KeyError(key)
        return f"{_hashed(f'{table}/{key}') % 10**self._digits:0{self._digits}d}"

    def reward_of_call(self, action: Action, key: str) -> float:
        """The part of `call_reward` that the first action earns."""
        text = action.text
        is_whole = len(text) == len(CALL + key) and action.finish_reason == "stop"
        earned = [text[:1] == CALL, is_whole, text[1:2].isdecimal(), text[1:2] == key]
        return self._call_reward * sum(earned) / len(earned)


class LookupSession:
    """One episode: a call, then an answer; or an answer at once."""

    resumable = True

    def __init__(self, env: Lookup, task: Task) -> None:
        async def look_up(arguments: Mapping[str, Any]) -> str:
            return env.value(task.info["table"], arguments["key"])

        self._env = env
        self._task = task
        self._tools = {"lookup": LimitedTool(Tool("lookup", _SCHEMA, look_up), _DEADLINE_S, _MOST_CHARACTERS)}
        self._turns = 0

    async def reset(self) -> str:
        """The key."""
        return str(self._task.prompt)

    async def step(self, action: Action) -> Turn:
        """The value of a call's key; any other action, and each after the first, ends the episode."""
        self._turns += 1
        is_call = self._turns == 1 and action.text.startswith(CALL) and action.finish_reason == "stop"
        calls = [ToolCall("call_0", "lookup", {"key": action.text.removeprefix(CALL)})] if is_call else []
        results, metrics = await run_calls(calls, self._tools)
        reward = self._env.reward_of_call(action, self._task.info["key"]) if self._turns == 1 else 0.0
        text = ERROR if metrics[ERRORS] else "".join(result["content"] for result in results)
        return Turn(text + END, reward, done=not metrics[CALLS], metrics=metrics)

    async def close(self) -> None:
        """Nothing is held."""


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
