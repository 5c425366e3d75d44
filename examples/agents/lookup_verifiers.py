"""The lookup task as an environment of `verifiers`: call a tool with the key, then answer with its value.

Runs in the Python of verifiers (lookup_verifiers.yaml). Nothing in it knows the trainer.
"""

import hashlib
import json
from typing import Any

import verifiers as vf
from datasets import Dataset

EVAL_TASKS = 256


def lookup(key: str, info: dict[str, Any]) -> str:
    """Looks a key up in the table of this task."""
    return value(info["table"]) if key == info["key"] else str((int(value(info["table"])) + 1) % 10)


def value(table: str) -> str:
    """The value of the task's key."""
    return str(hashlib.blake2b(f"{table}/value".encode(), digest_size=8).digest()[-1] % 10)


def rows(split: str, count: int) -> Dataset:
    """Tasks, each with a table of its own."""
    tasks = []
    for index in range(count):
        table = f"{split}/{index}"
        key = str(hashlib.blake2b(table.encode(), digest_size=8).digest()[-1] % 10)
        prompt = [{"role": "user", "content": f"{key}="}]
        tasks.append({"prompt": prompt, "answer": value(table), "info": {"table": table, "key": key}})
    return Dataset.from_list(tasks)


def call(completion: Any, info: dict[str, Any]) -> float:
    """The reward of the tool's call; the answer itself is scored by the run's rewards."""
    first = completion[0]
    calls = first.tool_calls or []
    if not calls:
        # No call, but perhaps the beginning of one.
        return 0.5 if (first.content or "").startswith("<tool_call>") else 0.0
    key = str(json.loads(calls[0].arguments).get("key", ""))
    is_alone = len(calls) == 1 and not first.content
    is_right: bool = key == info["key"]
    return 0.5 * (1 + is_alone + (len(key) == 1 and key.isdecimal()) + is_right)


class Lookup(vf.StatefulToolEnv):  # type: ignore[misc]
    """The tool finds the table of its task in `info`, which the model does not see."""

    def update_tool_args(self, tool_name: str, tool_args: dict[str, Any], messages: Any, state: Any, **_: Any) -> Any:
        """Adds the task to the model's arguments."""
        return {"key": str(tool_args.get("key", "")), "info": state["info"]}


def load_environment(train_tasks: int = 100_000) -> vf.Environment:
    """The environment, as verifiers finds it."""
    env = Lookup(
        dataset=rows("train", train_tasks),
        eval_dataset=rows("eval", EVAL_TASKS),
        rubric=vf.Rubric(funcs=[call]),
        max_turns=2,
    )
    env.add_tool(lookup, args_to_skip=["info"])
    return env
