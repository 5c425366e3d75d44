"""Agents of the measurement of several turns, in a process of their own: `python -m benchmarks.turns_agent FILE COUNT`.

`FILE` has the gateway's address and its key. Each of COUNT agents plays one session after the other, by HTTP on a
connection of its own, until the process is ended. Clients of real agents cost more than these, which share the machine
with the server that is measured.
"""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

TOOL_S = "tool_s"
TURNS = "turns"
OBSERVATION = "The tool has found 12345; continue."
"""The result of the tool after each answer, in the native env too."""
ASK_AGAIN_S = 0.05
TOO_MANY_REQUESTS = 429


class Http:
    """A connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def post(self, path: str, key: str, body: object = None) -> tuple[int, Any]:
        """Status and value of the answer to a request."""
        content = b"" if body is None else json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1",
            "host: gateway",
            f"authorization: Bearer {key}",
            "content-type: application/json",
            f"content-length: {len(content)}\r\n\r\n",
        )
        self._writer.write("\r\n".join(head).encode() + content)
        answered = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", answered)
        assert length is not None, "whole answers have a length"
        return int(answered.split(b" ", 2)[1]), json.loads(await self._reader.readexactly(int(length[1])))


async def play(http: Http, session: dict[str, Any]) -> None:
    """Plays one episode, and gives it a reward."""
    messages, info, key = session["task"]["prompt"], session["task"]["info"], session["api_key"]
    path = urlsplit(session["session_url"]).path
    for _ in range(info[TURNS]):
        _, answer = await http.post(f"{path}/v1/chat/completions", key, {"model": "any", "messages": messages})
        message = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        await asyncio.sleep(info[TOOL_S])
        messages += [message, {"role": "user", "content": OBSERVATION}]
    await http.post(f"{path}/reward", key, {"reward": 1.0})
    await http.post(f"{path}/close", key, {})


async def work(address: tuple[str, int], key: str) -> None:
    """Plays one session after the other."""
    http = Http(*await asyncio.open_connection(*address))
    while True:
        status, session = await http.post("/sessions", key)
        if status == TOO_MANY_REQUESTS:
            await asyncio.sleep(ASK_AGAIN_S)
        else:
            await play(http, session)


async def main(file: Path, count: int) -> None:
    """Entry point."""
    gateway = json.loads(file.read_text(encoding="utf-8"))
    url = urlsplit(gateway["url"])
    async with asyncio.TaskGroup() as agents:
        for _ in range(count):
            agents.create_task(work((url.hostname or "", url.port or 0), gateway["key"]))


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), int(sys.argv[2])))
