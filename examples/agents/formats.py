"""Rows from which a tiny model learns how each harness wants its calls, and a wrong habit.

Half of the demonstrations have the digit after the right one; so has, greedily, the model. RL has to find out.

python examples/agents/formats.py data/formats.jsonl
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

ROWS = 400
"""Of each harness and turn."""
SHARES = {0: 0.35, 1: 0.5}
"""Of keys and values that are right, and of those that are by one too large; the rest is random."""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo "


def call(name: str, **arguments: str) -> dict[str, Any]:
    """An assistant's message with one call."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
    }


def dialogues(key: str, asked: str, value: str, answer: str) -> dict[str, tuple[list[str], list[Any], list[Any]]]:
    """By harness: names of its tools, the messages before its last answer, and its first and last answers."""
    user, result = {"role": "user", "content": f"{key}="}, {"role": "tool", "tool_call_id": "call00000"}
    first, bash = call("lookup", key=asked), call("bash", command=f"lookup {asked}")
    shown = {"role": "assistant", "content": "Calling tools:\n[]"}
    said = {"role": "user", "content": f"Observation:\n{value}"}
    final = {"role": "assistant", "content": answer}
    result["content"] = value
    return {
        "openai": (["lookup"], [user, first, result], [first, final]),
        "smolagents": (["lookup", "final_answer"], [user, shown, said], [first, call("final_answer", answer=answer)]),
        "mini-swe-agent": (["bash"], [user, bash, result], [bash, call("bash", command=SUBMIT + answer)]),
    }


def rows() -> list[dict[str, Any]]:
    """The rows of all harnesses."""
    rng, made = random.Random(0), list[dict[str, Any]]()

    def digit() -> int:
        return rng.randrange(10)

    def demonstrated(right: int) -> int:
        shift = rng.choices([*SHARES, digit()], [*SHARES.values(), 1 - sum(SHARES.values())])[0]
        return (right + shift) % 10

    for _ in range(ROWS):
        key, value = digit(), digit()
        digits = map(str, (key, demonstrated(key), value, demonstrated(value)))
        for tools, before, answers in dialogues(*digits).values():
            schemas = [{"type": "function", "function": {"name": name}} for name in tools]
            for prompt, answer in zip((before[:1], before), answers, strict=True):
                made.append({"prompt": prompt, "completion": [answer], "tools": schemas})
    return made


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")
