"""An MCP server: `mcp_server.py [PORT]`, over stdio without a port.

With FOLDER in its environment it makes a file with its process id there, and starts once there is a file `open`.
"""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

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


@server.tool()
def leave_child() -> int:
    """Id of a process in a session of its own, which does not end by itself."""
    return subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, start_new_session=True).pid


def wait_for_start(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    while not (folder / "open").exists():
        time.sleep(0.01)


if __name__ == "__main__":
    if "FOLDER" in os.environ:
        wait_for_start(Path(os.environ["FOLDER"]))
    sys.stderr.write(f"to stderr {os.environ.get('MARK', '')}\n")
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
