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

from openai import AsyncOpenAI
from outside import post
from table import right_key, value_of

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
        return 0.0
    messages.append(first.model_dump(exclude_none=True))
    asked = [str(json.loads(call.function.arguments).get("key", "")) for call in first.tool_calls]
    for call, key in zip(first.tool_calls, asked, strict=True):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": value_of(task["info"], key)})
    await client.chat.completions.create(model=model, messages=messages, tools=[TOOL])
    return right_key(task["info"], asked)


@cache
def shared_client() -> AsyncOpenAI:
    """One client, and so one pool of connections, for all episodes of a rollout server."""
    # Hundreds of episodes begin at once: by default a connection must be there within 5 s.
    return AsyncOpenAI(base_url="http://unset", api_key="unset", timeout=300)


async def play(task: Any, endpoint: Any) -> float:
    """One episode, as the env `agent` calls it."""
    client = shared_client().with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    return await solve(client, endpoint.model, {"prompt": task.prompt, "info": task.info})


async def main() -> None:
    """One episode, as a program, which posts its reward."""
    async with AsyncOpenAI() as client:  # OPENAI_BASE_URL and OPENAI_API_KEY
        reward = await solve(client, os.environ["OPENAI_MODEL"], json.load(sys.stdin))
    post(f"{os.environ['SLIPSTREAM_SESSION_URL']}/reward", os.environ["OPENAI_API_KEY"], {"reward": reward})


if __name__ == "__main__":
    asyncio.run(main())
