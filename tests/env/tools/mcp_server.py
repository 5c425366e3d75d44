"""An MCP server: `mcp_server.py [PORT]`, over stdio without a port."""

import asyncio
import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test", log_level="WARNING")
state = {"calls": 0}


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def count() -> int:
    """Number of calls in this process."""
    state["calls"] += 1
    return state["calls"]


@server.tool()
def process() -> list[int]:
    """Ids of this process and its parent."""
    return [os.getpid(), os.getppid()]


@server.tool()
async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def complain(characters: int) -> None:
    sys.stderr.write("x" * characters)
    sys.stderr.flush()


@server.tool()
def fail() -> str:
    raise ToolError("the reason")


@server.tool()
def end() -> None:
    os._exit(3)


if __name__ == "__main__":
    sys.stderr.write(f"to stderr {os.environ.get('MARK', '')}\n")
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
