"""A plain loop of OpenAI's SDK that plays the lookup task: call a tool with the key, then answer with its value.

As the function of the env `agent` (lookup.yaml), or as a program: it finds its model in the environment and its task as
JSON on the standard input. Nothing in the loop knows the trainer.
"""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from openai import AsyncOpenAI
from outside import post
from table import parts, right_key, value_of

Tool = Callable[[str], Awaitable[str]]

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks a key up in the table of this task.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


async def ask(client: AsyncOpenAI, model: str, prompt: str, tool: Tool) -> tuple[list[str], str]:
    """The loop: one question. Returns the keys that the model looked up, and its answer."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    first = (await client.chat.completions.create(model=model, messages=messages, tools=[TOOL])).choices[0].message
    if not first.tool_calls:
        return [], first.content or ""
    messages.append(first.model_dump(exclude_none=True))
    calls: list[Any] = [*first.tool_calls]
    asked = [str(json.loads(call.function.arguments).get("key", "")) for call in calls]
    for call, key in zip(calls, asked, strict=True):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": await tool(key)})
    last = (await client.chat.completions.create(model=model, messages=messages, tools=[TOOL])).choices[0].message
    return asked, last.content or ""


def table_of(info: dict[str, Any]) -> Tool:
    """The tool of a task."""

    async def look_up(key: str) -> str:
        return value_of(info, key)

    return look_up


@cache
def shared_client() -> AsyncOpenAI:
    """One client, and so one pool of connections, for all episodes of a rollout server."""
    # Hundreds of episodes begin at once: by default a connection must be there within 5 s.
    return AsyncOpenAI(base_url="http://unset", api_key="unset", timeout=300)


def client_of(endpoint: Any, label: str = "") -> AsyncOpenAI:
    """The client of a session, whose calls have a label."""
    return shared_client().with_options(
        base_url=endpoint.base_url, api_key=endpoint.api_key, default_headers={"x-slipstream-agent": label}
    )


async def play(task: Any, endpoint: Any) -> float:
    """One episode, as the env `agent` calls it; returns what the lookup earned. The run's rewards score the answer."""
    asked, _ = await ask(client_of(endpoint), endpoint.model, task.prompt, table_of(task.info))
    return right_key(task.info, asked)


async def play_team(task: Any, endpoint: Any) -> float:
    """One episode in which the tool is another agent, with a context, a label and a reward of its own."""
    main, helper = (client_of(endpoint, label) for label in ("main", "helper"))

    async def ask_helper(key: str) -> str:
        asked, answer = await ask(helper, endpoint.model, f"{key}=", table_of(task.info))
        reward = {"reward": sum(parts({**task.info, "key": key}, asked, answer).values()), "agent": "helper"}
        await asyncio.to_thread(post, f"{endpoint.session_url}/reward", endpoint.api_key, reward)
        return answer

    asked, _ = await ask(main, endpoint.model, task.prompt, ask_helper)
    return right_key(task.info, asked)


async def main() -> None:
    """One episode, as a program, which posts its reward."""
    task = json.load(sys.stdin)
    async with AsyncOpenAI() as client:  # OPENAI_BASE_URL and OPENAI_API_KEY
        asked, _ = await ask(client, os.environ["OPENAI_MODEL"], task["prompt"], table_of(task["info"]))
    reward = {"reward": right_key(task["info"], asked)}
    post(f"{os.environ['SLIPSTREAM_SESSION_URL']}/reward", os.environ["OPENAI_API_KEY"], reward)


if __name__ == "__main__":
    asyncio.run(main())
