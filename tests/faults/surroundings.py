"""Env and reward, found by `tests.faults.surroundings:<attribute>`, that need an MCP server and the sandbox.

`python -m tests.faults.surroundings judge|openenv PORT` is one of two servers that a test kills.
"""

import asyncio
import json
import os
import signal
import sys
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from slipstream.configs.schema.run import ToolConfig
from slipstream.env.base import Action, Task, ToolCall, Turn
from slipstream.env.builtin.digits import Digits
from slipstream.env.registry import build_tools
from slipstream.env.tools.session import ToolEnv, ToolSession
from slipstream.rewards.base import Episode, Score
from slipstream.rewards.functions.code import Code
from tests.rewards.functions.http_server import serving

TURNS = 3
TURN_REWARD = 0.25
STEP_S = 0.05
PROGRAM = "import time\ntime.sleep(0.1)\ndone = True"


class Adding(ToolEnv):
    """Dialogues of `TURNS` turns; after each but the last, the tool `add` of an MCP server is called."""

    offers_tools = False  # the policy's answers have no calls

    def __init__(self, url: str, programs: str) -> None:
        """`programs`: the folder in which this process and its reward workers find bubblewrap."""
        os.environ["PATH"] = programs
        tool = ToolConfig(name="mcp", options={"url": url, "tools": ["add"]}, deadline_s=10.0)
        super().__init__(Digits(operation="reverse", length=3), build_tools((tool,)))

    def session(self, task: Task) -> "AddingSession":
        return AddingSession(self.opening(task), self._toolboxes)


class AddingSession(ToolSession):
    turns = 0

    async def step(self, action: Action) -> Turn:
        self.turns += 1
        calls = [ToolCall("0", "add", {"a": self.turns, "b": 1})] if self.turns < TURNS else []
        turn = await super().step(replace(action, tool_calls=calls, finish_reason="stop"))
        return replace(turn, reward=TURN_REWARD)


class RunsProgram:
    """The reward `code` of a right program, whatever the answer is."""

    def __init__(self) -> None:
        self._code = Code(limits={"cpu_s": 60, "wall_s": 60})  # a late program scores 0

    async def __call__(self, episode: Episode) -> Score:
        turn = replace(episode.turns[-1], text=f"```python\n{PROGRAM}\n```")
        return await self._code(replace(episode, reference="assert done", turns=[turn]))


def judge(port: int) -> None:
    """A judge that gives every answer the best rating."""
    reply = {"choices": [{"message": {"content": "Score: 10"}}]}
    with serving(lambda path, headers, body: (200, reply), port=port):
        signal.pause()


async def openenv(port: int) -> None:
    """An OpenEnv server with episodes of `TURNS` turns."""
    from websockets.asyncio.server import serve

    async def play(connection: Any) -> None:
        turns = 0
        async for text in connection:
            turns = 0 if json.loads(text)["type"] == "reset" else turns + 1
            await asyncio.sleep(STEP_S)
            result = {"observation": {"text": f"turn {turns}"}, "reward": TURN_REWARD, "done": turns == TURNS}
            await connection.send(json.dumps({"type": "observation", "data": result}))

    def schema(connection: Any, request: Any) -> Any:
        return connection.respond(HTTPStatus.OK, "{}") if request.path == "/schema" else None

    async with serve(play, "127.0.0.1", port, process_request=schema) as server:
        await server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == "judge":
        judge(int(sys.argv[2]))
    else:
        asyncio.run(openenv(int(sys.argv[2])))
