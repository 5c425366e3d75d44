"""A plain loop of OpenAI's SDK with one tool, a shell in the task's environment.

As the command of the env `harbor` (harbor.yaml): it finds its model in the environment and its task as JSON on the
standard input. Nothing in the loop knows the trainer.
"""

import json
import os
import subprocess
import sys
from typing import Any

from openai import OpenAI

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Runs a command of bash and returns its output. Files stay; processes end with the command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
TURNS = 20
COMMAND_S = 60
SHOWN_CHARACTERS = 4000


def run(command: str) -> str:
    """The output of a command in the task's environment."""
    try:
        done = subprocess.run(
            [os.environ["SLIPSTREAM_SHELL"], "bash", "-c", command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=COMMAND_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"The command did not end within {COMMAND_S} s."
    return f"{done.stdout.decode(errors='replace')[-SHOWN_CHARACTERS:]}\nexit code {done.returncode}"


def main() -> None:
    """Calls the model until it answers without a command."""
    client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
    messages: list[Any] = [{"role": "user", "content": json.load(sys.stdin)["prompt"]}]
    for _ in range(TURNS):
        completion = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, tools=[TOOL])
        answer: Any = completion.choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            return
        for call in answer.tool_calls:
            try:
                output = run(str(json.loads(call.function.arguments)["command"]))
            except (ValueError, KeyError, TypeError):
                output = "The arguments must be JSON with a command."
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})


if __name__ == "__main__":
    main()
