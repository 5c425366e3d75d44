"""A plain loop of OpenAI's SDK that plays the lookup task: call a tool with the key, then answer with its value.

As the function of the env `agent` (lookup.yaml), or as a program: it finds its model in the environment and its task as
JSON on the standard input. Nothing in the loop knows the trainer.
"""

import asyncio
import json
import os
import sys
from functools import cache
from typing import Any

import httpx
from openai import AsyncOpenAI

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks a key up in the table of this task.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


async def solve(client: AsyncOpenAI, model: str, task: dict[str, Any]) -> float:
    """Plays one task; returns what the call of the tool earned. The answer itself is scored by the run's rewards."""
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    first = (await client.chat.completions.create(model=model, messages=messages, tools=[TOOL])).choices[0].message
    if not first.tool_calls:
        # No call, but perhaps the beginning of one.
        return 0.5 if (first.content or "").startswith("<tool_call>") else 0.0
    calls: list[Any] = [*first.tool_calls]
    asked = [str(json.loads(call.function.arguments).get("key", "")) for call in calls]
    messages.append(first.model_dump(exclude_none=True))
    for call, key in zip(calls, asked, strict=True):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": look_up(task, key)})
    await client.chat.completions.create(model=model, messages=messages, tools=[TOOL])
    is_alone = len(calls) == 1 and not first.content
    is_right: bool = asked[0] == task["info"]["key"]
    return 0.5 * (1 + is_alone + (len(asked[0]) == 1 and asked[0].isdecimal()) + is_right)


def look_up(task: dict[str, Any], key: str) -> str:
    """The value of a key in the task's table: a wrong one for a wrong key."""
    value: str = task["reference"]
    return value if key == task["info"]["key"] else str((int(value) + 1) % 10)


@cache
def shared_client() -> AsyncOpenAI:
    """One client, and so one pool of connections, for all episodes of a rollout server."""
    # Hundreds of episodes begin at once: by default a connection must be there within 5 s.
    return AsyncOpenAI(base_url="http://unset", api_key="unset", timeout=300)


async def play(task: Any, endpoint: Any) -> float:
    """One episode, as the env `agent` calls it."""
    client = shared_client().with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    return await solve(client, endpoint.model, {"prompt": task.prompt, "reference": task.reference, "info": task.info})


async def main() -> None:
    """One episode, as a program, which posts its reward."""
    async with AsyncOpenAI() as client, httpx.AsyncClient() as http:  # OPENAI_BASE_URL and OPENAI_API_KEY
        reward = await solve(client, os.environ["OPENAI_MODEL"], json.load(sys.stdin))
        posted = await http.post(
            f"{os.environ['SLIPSTREAM_SESSION_URL']}/reward",
            headers={"Authorization": f"Bearer {client.api_key}"},
            json={"reward": reward},
        )
        posted.raise_for_status()


if __name__ == "__main__":
    asyncio.run(main())
