"""Agents of the measurement of several turns, in a process of their own: `python -m benchmarks.turns_agent FILE COUNT`.

`FILE` has the gateway's address and its key. Each of COUNT agents plays one session after the other with a plain HTTP
client, until the process is ended.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx

TOOL_S = "tool_s"
TURNS = "turns"
OBSERVATION = "The tool has found 12345; continue."
"""What a tool gives after each answer, in the native env too."""
ASK_AGAIN_S = 0.02
TIMEOUT_S = 600.0


async def play(http: httpx.AsyncClient, session: dict[str, Any]) -> None:
    """Plays one episode, and gives it a reward."""
    messages, info = session["task"]["prompt"], session["task"]["info"]
    headers = {"authorization": f"Bearer {session['api_key']}"}
    for _ in range(info[TURNS]):
        response = await http.post(
            f"{session['base_url']}/chat/completions", json={"model": "any", "messages": messages}, headers=headers
        )
        answer = response.raise_for_status().json()["choices"][0]["message"]
        await asyncio.sleep(info[TOOL_S])
        messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": OBSERVATION}]
    for path, body in (("/reward", {"reward": 1.0}), ("/close", {})):
        (await http.post(session["session_url"] + path, json=body, headers=headers)).raise_for_status()


async def work(http: httpx.AsyncClient, url: str, key: str) -> None:
    """Plays one session after the other."""
    while True:
        opened = await http.post(f"{url}/sessions", headers={"authorization": f"Bearer {key}"})
        if opened.status_code == httpx.codes.TOO_MANY_REQUESTS:
            await asyncio.sleep(ASK_AGAIN_S)
            continue
        await play(http, opened.raise_for_status().json())


async def main(file: Path, count: int) -> None:
    """Entry point."""
    gateway = json.loads(file.read_text(encoding="utf-8"))
    limits = httpx.Limits(max_connections=count, max_keepalive_connections=count)
    async with (
        httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, trust_env=False) as http,
        asyncio.TaskGroup() as agents,
    ):
        for _ in range(count):
            agents.create_task(work(http, gateway["url"], gateway["key"]))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
